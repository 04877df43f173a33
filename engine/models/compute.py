"""With what a model computes: chosen once where it is loaded, carried as one value down to its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

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
