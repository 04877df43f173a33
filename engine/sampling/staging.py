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
_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


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
    starts: list[int] = []
    size = 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    packed = np.empty(max(size, _ALIGN), dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    host = torch.from_numpy(packed)
    if torch.cuda.is_available():
        host = host.pin_memory()
    memory = host.to(device, non_blocking=True)
    return [
        memory[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def to_host(tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """Copy int32, int64 and float32 tensors of one device to the host, with one transfer for all of them.

    The host waits here for the device, once. On a CPU the arrays share the memory of the tensors.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    words = [tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors]
    packed = torch.cat(words).cpu().numpy()
    arrays: list[npt.NDArray[Any]] = []
    start = 0
    for tensor, part in zip(tensors, words, strict=True):
        flat = packed[start : start + part.numel()].view(str(tensor.dtype).removeprefix("torch."))
        arrays.append(flat.reshape(tensor.shape))
        start += part.numel()
    return arrays
