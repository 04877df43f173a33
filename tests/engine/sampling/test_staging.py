"""Arrays that travel in one transfer arrive as they were; the transfer itself needs a GPU and is not tested here."""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.staging import pack, pack_words, to_device, to_host, unpack, unpack_words

ARRAYS = [
    np.array([True, False, True]),
    np.array([[1, -2], [3, 2**31 - 1], [5, 6]], dtype=np.int32),
    np.zeros((0, 4), dtype=np.float32),
    np.array([2**62, -1], dtype=np.int64),
    np.array([0.5, -np.inf, 3.25], dtype=np.float32),
    np.array(7.5, dtype=np.float64),
]


def test_packed_arrays_keep_shape_type_and_values() -> None:
    packed = pack(ARRAYS)
    assert (packed.dtype, packed.numel()) == (torch.uint8, 8 + 24 + 0 + 16 + 16 + 8)
    tensors = unpack(packed.clone(), ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)


def test_nothing_to_pack_still_takes_a_word() -> None:
    assert pack([]).numel() == pack([np.zeros(0, dtype=np.int32)]).numel() == 8
    assert unpack(pack([]), []) == []


def test_packed_words_keep_shape_type_and_values() -> None:
    tensors = [torch.from_numpy(array) for array in (ARRAYS[1], ARRAYS[3], ARRAYS[4], ARRAYS[2])]
    tensors.append(torch.arange(6, dtype=torch.int32).view(2, 3).t())  # not contiguous
    packed = pack_words(tensors)
    assert (packed.dtype, packed.numel()) == (torch.int32, 6 + 4 + 3 + 0 + 6)
    for tensor, array in zip(tensors, unpack_words(packed.numpy().copy(), tensors), strict=True):
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())


def test_on_a_cpu_nothing_is_copied() -> None:
    (tensor,) = to_device([ARRAYS[3]], torch.device("cpu"))
    assert tensor.data_ptr() == ARRAYS[3].ctypes.data
    (array,) = to_host([tensor])
    assert array.ctypes.data == tensor.data_ptr()
    assert to_host([]) == []
