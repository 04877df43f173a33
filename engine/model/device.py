"""Which device, element type and threads a process computes with, from what the settings ask and the machine has."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError


def pick_device(wanted: str) -> torch.device:
    """The device named, or what there is for `auto`.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    has_cuda: bool = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for, but torch sees no GPU here; allowed here: cpu, auto")
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def pick_dtype(wanted: str) -> torch.dtype:
    """`auto` is bfloat16."""
    return torch.float32 if wanted == "float32" else torch.bfloat16


def threads_per_shard(config: EngineConfig) -> int:
    """CPU threads one shard computes with."""
    return config.num_threads or max(1, (os.cpu_count() or 1) // config.tensor_parallel_size)


def set_threads(config: EngineConfig, *, own_threads: bool = False) -> None:
    """Apply `threads_per_shard` to the calling thread's PyTorch operators.

    Args:
        config: of the engine.
        own_threads: the forward brings threads of its own, and what is left to PyTorch is small: it gets one, because
            its threads wait for each other at every operator, which takes long on a busy machine.
    """
    torch.set_num_threads(1 if own_threads else threads_per_shard(config))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_KEPT_BYTES = 1 << 30

_LARGEST_FROM_HEAP = 32 << 20
"""The most that glibc takes for the mmap threshold."""


def keep_freed_memory() -> bool:
    """Let the allocator keep up to 1 GiB of freed memory for the next step, in the whole process. Repeatable.

    Returns:
        Whether the C library took it; others than glibc do not know it.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
    return bool(trimmed and mapped)


KernelKind = Literal["auto", "native", "torch", "reference"]
"""Who computes a forward: the fastest that serves; the native library, or an error; PyTorch's operators; their slow
twins: plain linear layers and norms, and attention in loops."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Element type, device and kernels of one model in one process."""

    dtype: torch.dtype
    """Of weights, activations and KV cache: bfloat16 or float32."""
    device: torch.device
    kernel: KernelKind

    @property
    def layers(self) -> Literal["auto", "reference"]:
        """Kind of the linear layers, norms and attention where PyTorch computes them."""
        return "reference" if self.kernel == "reference" else "auto"
