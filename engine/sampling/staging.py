"""Copies of small host arrays to the device of the logits.

Owns the rule that the inputs of one operation travel in one transfer. On CUDA the transfer starts from pinned memory
and the host does not wait for it. On a CPU the tensors share the memory of the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 8
DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Element types that travel, by NumPy's names."""


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of bool, int32, int64, float32 or float64 to a device, with one transfer for all of them.

    Args:
        arrays: contiguous arrays of any shape. They must not change until the tensors have been used.
        device: the target device.

    Returns:
        One tensor per array, of the same shape and element type.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    host = pack(arrays)
    if torch.cuda.is_available():
        host = host.pin_memory()
    return unpack(host.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """[bytes] uint8 on the host: the arrays one after the other, each at a multiple of _ALIGN bytes."""
    packed = np.empty(max(sum(map(_room, arrays)), _ALIGN), dtype=np.uint8)
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += _room(array)
    return torch.from_numpy(packed)


def unpack(memory: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """The tensors of `pack` in its memory, which may have been copied to another device."""
    tensors: list[torch.Tensor] = []
    start = 0
    for array in arrays:
        part = memory[start : start + array.nbytes]
        tensors.append(part.view(DTYPES[array.dtype.name]).view(array.shape))
        start += _room(array)
    return tensors


def _room(array: npt.NDArray[Any]) -> int:
    """Bytes that an array takes in the packed memory."""
    return -(-array.nbytes // _ALIGN) * _ALIGN


def to_host(tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """Copy int32, int64 and float32 tensors of one device to the host, with one transfer for all of them.

    The host waits here for the device, once. On a CPU the arrays share the memory of the tensors.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return unpack_words(pack_words(tensors).cpu().numpy(), tensors)


def pack_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[words] int32 on the device: the tensors one after the other."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors])


def unpack_words(packed: npt.NDArray[np.int32], tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """The arrays of `pack_words`, in its memory on the host."""
    arrays: list[npt.NDArray[Any]] = []
    start = 0
    for tensor in tensors:
        num_words = tensor.numel() * tensor.element_size() // packed.itemsize
        flat = packed[start : start + num_words].view(str(tensor.dtype).removeprefix("torch."))
        arrays.append(flat.reshape(tensor.shape))
        start += num_words
    return arrays


def with_device_tokens(token_ids: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Token ids of rows, some of which are in device memory.

    Args:
        token_ids: [N] int64, used where `places` is negative.
        ids: [M] int64 ids in device memory.
        places: [N] int64 index into `ids`.
    """
    return torch.where(places >= 0, ids[places.clamp(min=0)], token_ids)
