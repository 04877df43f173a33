"""Linear layers and RMSNorm: each fast implementation against the plain one or the definition.

Promise: the same result up to the rounding of bf16. A fused elementwise operation rounds once less.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.layers import Experts, GatedMlp, PackedLinear, PlainLinear, RmsNorm, make_linear

PACKABLE = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_packs_bf16_and_nothing_else() -> None:
    weight = torch.randn(4, 8)
    assert isinstance(make_linear(weight), PlainLinear)
    assert isinstance(make_linear(weight.bfloat16(), kind="reference"), PlainLinear)
    assert isinstance(make_linear(weight.bfloat16()), PackedLinear if PACKABLE else PlainLinear)


@pytest.mark.skipif(not PACKABLE, reason="this CPU has no bf16 in oneDNN")
@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 6, 16, 33, 130]),
    size=st.sampled_from([(1, 8), (97, 48), (192, 576), (576, 161)]),
    biased=st.booleans(),
    operation=st.sampled_from(["plain", "silu", "gelu_tanh", "times", "plus"]),
)
def test_packed_equals_plain(rows: int, size: tuple[int, int], biased: bool, operation: str) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(size).bfloat16() / size[1] ** 0.5
    bias = torch.randn(size[0]).bfloat16() if biased else None
    x, other = torch.randn(rows, size[1]).bfloat16(), torch.randn(rows, size[0]).bfloat16()
    before = other.clone()

    def apply(layer: PackedLinear | PlainLinear, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if operation == "plain":
            return layer(x)
        return getattr(layer, operation)(*((x,) if operation in ("silu", "gelu_tanh") else (x, other)))

    exact = apply(PlainLinear(weight.float(), None if bias is None else bias.float()), x.float(), other.float())
    packed = apply(PackedLinear(weight, bias), x, other)
    assert packed.shape == exact.shape
    assert packed.dtype == torch.bfloat16
    # One rounding to bf16 is at most 2^-8 of the value; a second one may follow where oneDNN rounds the product first.
    assert ((packed.float() - exact).abs() <= 2**-7 * exact.abs() + 0.02).all()
    assert torch.equal(other, before)


def test_plain_layer_leaves_its_inputs_alone() -> None:
    layer = PlainLinear(torch.randn(5, 3), torch.randn(5))
    x, other = torch.randn(2, 3), torch.randn(2, 5)
    kept = x.clone(), other.clone()
    assert torch.allclose(layer.plus(x, other), layer(x) + other)
    assert torch.allclose(layer.times(x, other), layer(x) * other)
    assert torch.allclose(layer.silu(x), torch.nn.functional.silu(layer(x)))
    assert torch.allclose(layer.gelu_tanh(x), torch.nn.functional.gelu(layer(x), approximate="tanh"))
    assert torch.equal(x, kept[0])
    assert torch.equal(other, kept[1])


@settings(max_examples=60)
@given(
    rows=st.integers(1, RmsNorm.MAX_FAST_ROWS + 3),
    size=st.sampled_from([2, 48, 576]),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -50.0]),
)
def test_fast_norm_equals_the_definition(rows: int, size: int, scale: float, shift: float) -> None:
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


def test_a_float32_norm_uses_the_plain_operator() -> None:
    weight, x = torch.randn(8), torch.randn(3, 8)
    exact = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    assert torch.equal(RmsNorm(weight, 1e-6, fast=True)(x), exact)


@pytest.mark.parametrize("normalise", [False, True])
def test_experts_are_the_weighted_sum_of_the_best_ones(normalise: bool) -> None:
    """Against the definition, one row and one expert at a time."""
    torch.manual_seed(3)
    size, inner, num_experts, per_token = 6, 10, 5, 2
    router = torch.randn(num_experts, size)
    mlps = [
        GatedMlp(*(PlainLinear(torch.randn(shape)) for shape in ((inner, size), (inner, size), (size, inner))))
        for _ in range(num_experts)
    ]
    experts = Experts(PlainLinear(router), mlps, per_token=per_token, normalise=normalise)
    x, other = torch.randn(9, size), torch.randn(9, size)
    expected = torch.zeros(9, size)
    for row in range(9):
        probs = (router @ x[row]).softmax(0)
        best = probs.argsort(descending=True)[:per_token]
        total = probs[best].sum() if normalise else 1.0
        for number in best.tolist():
            expected[row] += probs[number] / total * mlps[number](x[row : row + 1])[0]
    torch.testing.assert_close(experts(x), expected)
    kept = other.clone()
    torch.testing.assert_close(experts.plus(x, other), expected + other)
    assert torch.equal(other, kept)
