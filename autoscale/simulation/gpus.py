"""GPUs by name: what their public data sheets say of memory, bandwidth and arithmetic.

Owns the figures only. A deployment never uses them; it measures its own costs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    """Name on the command line."""
    memory_mib: int
    """Memory that the driver reports, in MiB; a little below the size that the data sheet names."""
    bytes_per_s: float
    """Memory bandwidth of the data sheet, bytes per second."""
    flops_per_s: float
    """Dense bfloat16 operations of the data sheet, per second, without sparsity."""

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return self.memory_mib * MIB


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("A10", 23_028, 600e9, 125e12),
        Gpu("A100-40", 40_960, 1555e9, 312e12),
        Gpu("A100-80", 81_920, 2039e9, 312e12),
        Gpu("H100", 81_559, 3350e9, 989e12),
        Gpu("H100-PCIe", 81_559, 2000e9, 756e12),
        Gpu("H200", 143_771, 4800e9, 989e12),
        Gpu("L4", 23_034, 300e9, 121e12),
        Gpu("L40S", 46_068, 864e9, 362e12),
        Gpu("RTX3090", 24_576, 936e9, 71e12),
        Gpu("RTX4090", 24_564, 1008e9, 165e12),
    )
}
"""GPUs by lower-case name."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Some GPUs of one kind on one node."""

    gpu: Gpu
    """The kind."""
    count: int
    """Number of GPUs."""

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def parse_gpus(text: str) -> Cluster:
    """GPUs from a text such as `4xH100` or `L4`.

    Raises:
        ConfigError: the text is malformed, or names no GPU of the table.
    """
    match = re.fullmatch(r"(?:(\d{1,4})x)?([\w-]+)", text.strip(), re.IGNORECASE)
    gpu = GPUS.get(match[2].lower()) if match else None
    if match is None or gpu is None or match[1] == "0":
        names = ", ".join(each.name for each in GPUS.values())
        raise ConfigError(f"--gpus: {text!r} given; allowed is a count and a name, such as 4xH100, of: {names}")
    return Cluster(gpu, int(match[1] or 1))
