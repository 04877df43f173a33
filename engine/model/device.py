"""The device, element type and threads of a process, from the settings and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.quantization.kv_cache import FP8, INT8
from engine.threads import threads_per_shard


def pick_device(wanted: str) -> torch.device:
    """The device of a setting: cpu, cuda, or for `auto` cuda where there is one.

    Raises:
        ConfigError: the setting is cuda and there is no GPU.
    """
    has_cuda: bool = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for, but torch sees no GPU here; allowed here: cpu, auto")
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def with_device(config: EngineConfig, *, has_cuda: bool | None = None) -> EngineConfig:
    """The settings with `auto` replaced by the device of this machine, so that defaults of the device apply.

    Args:
        config: the settings.
        has_cuda: whether there is a GPU; None asks PyTorch.

    Raises:
        ConfigError: the device does not take `block_size`.
    """
    if config.device != "auto":
        return config
    found = torch.cuda.is_available() if has_cuda is None else has_cuda
    return EngineConfig.parse(config.model_dump() | {"device": "cuda" if found else "cpu"})


def gpu_name(
    device: torch.device, properties_of: Callable[[torch.device], Any] = torch.cuda.get_device_properties
) -> str:
    """Name and memory of the GPU, to tell apart measurements of different GPUs; empty for a CPU.

    Args:
        device: the GPU or CPU.
        properties_of: its `name` and `total_memory`.
    """
    if device.type != "cuda":
        return ""
    properties = properties_of(device)
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def pick_dtype(wanted: str) -> torch.dtype:
    """The element type of a setting; `auto` is bfloat16."""
    return torch.float32 if wanted == "float32" else torch.bfloat16


def pick_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The element type of the target's KV cache, as `engine.quantization.kv_cache` has it.

    Args:
        config: of the engine.
        dtype: of the model.
    """
    return {"auto": dtype, "int8": INT8, "fp8": FP8}[config.kv_cache_dtype]


def set_threads(config: EngineConfig, *, own_threads: bool = False) -> None:
    """Apply `threads_per_shard` to the calling thread's PyTorch operators.

    Args:
        config: of the engine.
        own_threads: whether the forward has its own threads. PyTorch then computes only small operators and gets one
            thread, because its threads wait for each other at every operator.
    """
    torch.set_num_threads(1 if own_threads else threads_per_shard(config))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_KEPT_BYTES = 1 << 30

_LARGEST_FROM_HEAP = 32 << 20
"""Largest mmap threshold that glibc accepts."""


def keep_freed_memory() -> bool:
    """Let the allocator keep up to 1 GiB of freed memory for the next step, in the whole process. Repeatable.

    Returns:
        Whether the C library accepted the setting. Only glibc has it.
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


def release_freed_memory() -> None:
    """Give memory that was freed back to the system, once. For the end of a start, whose buffers nothing needs again.

    Without it `keep_freed_memory` keeps them. Only glibc needs the call.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


KernelKind = Literal["auto", "native", "torch", "triton", "invariant", "reference"]
"""The implementation of a forward. `auto`: the fastest one that supports the model. `native`: the native library, or an
error. `torch`: PyTorch's operators. `triton`: fused kernels, on a GPU. `invariant`: those, with products and attention
that do not depend on the batch. `reference`: slow twins of PyTorch's operators, with attention in loops."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Element type, device and kernels of one model in one process."""

    dtype: torch.dtype
    """Element type of weights, activations and KV cache: bfloat16 or float32."""
    device: torch.device
    kernel: KernelKind

    @property
    def layers(self) -> Literal["auto", "reference"]:
        """Kind of the linear layers, norms and attention computed by PyTorch."""
        return "reference" if self.kernel == "reference" else "auto"
