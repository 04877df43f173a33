"""Fused elementwise kernels of a decoder layer: residual add + RMSNorm, and SiLU(gate) * up.

Owns one program per row, or per row and block of columns; statistics are float32.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

COLUMNS = 1024
"""Columns of one program of `silu_mul`."""


@triton.jit
def add_rms_norm_kernel(hidden, delta, weight, out, size, eps, BLOCK: tl.constexpr):
    """hidden += delta; out = hidden / sqrt(mean(hidden^2) + eps) * weight, for one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    total = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(hidden.dtype.element_ty)
    tl.store(hidden + at, rounded, mask=inside)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    y = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate, up, size, BLOCK: tl.constexpr):
    """gate = silu(gate) * up, for one row and one block of columns."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-x)) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + at, y.to(gate.dtype.element_ty), mask=inside)


@torch.library.custom_op("paceline::add_rms_norm", mutates_args=("hidden",))
def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `hidden` in place, and return RMSNorm(hidden). One launch.

    Args:
        hidden: [N, H] contiguous.
        delta: [N, H] contiguous.
        weight: [H].
        eps: added to the mean square.
    """
    out = torch.empty_like(hidden)
    rows, size = hidden.shape
    if rows > 0:
        add_rms_norm_kernel[(rows,)](hidden, delta, weight, out, size, eps, BLOCK=triton.next_power_of_2(size))
    return out


@add_rms_norm.register_fake
def _(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    del delta, weight, eps
    return torch.empty_like(hidden)


@torch.library.custom_op("paceline::silu_mul", mutates_args=("gate",))
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> None:
    """gate = silu(gate) * up in place, both [N, I] contiguous. One launch."""
    rows, size = gate.shape
    if rows > 0:
        silu_mul_kernel[(rows, triton.cdiv(size, COLUMNS))](gate, up, size, BLOCK=COLUMNS)


@silu_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> None:
    del gate, up


def add_rms_norm_reference(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `add_rms_norm`."""
    return F.rms_norm(hidden.add_(delta), (hidden.shape[1],), weight, eps)


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> None:
    """The twin of `silu_mul`."""
    gate.copy_(F.silu(gate.float()) * up.float())
