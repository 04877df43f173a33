"""RMSNorm by way of LayerNorm against the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.layers import RmsNorm


@settings(max_examples=60)
@given(
    rows=st.integers(1, RmsNorm.MAX_FAST_ROWS + 3),
    size=st.sampled_from([2, 48, 576]),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -50.0]),
)
def test_fast_equals_the_definition(rows: int, size: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    weight = torch.randn(size, generator=generator).bfloat16()
    x = (torch.randn(rows, size, generator=generator) * scale + shift).bfloat16()
    found = RmsNorm(weight, 1e-5, fast=True)(x)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    # Up to the row limit there is a single rounding to bf16, of at most 2^-8; F.rms_norm rounds twice.
    bound = 2**-8 if rows <= RmsNorm.MAX_FAST_ROWS else 2**-7
    assert ((found.double() - exact).abs() <= 1.01 * bound * exact.abs() + 1e-6).all()


def test_float32_takes_the_plain_route() -> None:
    weight, x = torch.randn(8), torch.randn(3, 8)
    exact = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    assert torch.equal(RmsNorm(weight, 1e-6, fast=True)(x), exact)
