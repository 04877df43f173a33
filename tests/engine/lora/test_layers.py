"""Linear layers with adapters, by value on small integers: which rows and outputs each adapter changes, and by what."""

from __future__ import annotations

import pytest
import torch

from engine.lora.layers import ActiveRows, AdaptedLinear, LowRank, OutputPart, RowGroup
from engine.model.layers import PlainLinear

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
BASE = X @ W.T
"""[3, 3]: the inputs and their sum."""
SUM = LowRank(torch.tensor([[1.0, 1.0]]), (OutputPart(torch.tensor([[10.0]]), slice(1, 2), slice(0, 1)),))
"""Adds ten times the sum of the inputs to output 1."""
TWO_PARTS = LowRank(
    torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]),
    (
        OutputPart(torch.tensor([[100.0]]), slice(0, 1), slice(0, 1)),
        OutputPart(torch.tensor([[1.0, 1.0], [0.0, -1.0]]), slice(1, 3), slice(1, 3)),
    ),
)
"""Adds 100 times input 0 to output 0, 3 times input 1 to output 1, and -2 times input 1 to output 2."""


def layer(*groups: RowGroup) -> AdaptedLinear:
    active = ActiveRows()
    active.groups = groups
    made = AdaptedLinear(PlainLinear(W), active)
    made.adapters = {1: SUM, 2: TWO_PARTS}
    return made


def rows(*index: int) -> torch.Tensor:
    return torch.tensor(index, dtype=torch.int64)


ADDED_1 = torch.tensor([[0.0, 30.0, 0.0], [0.0, 70.0, 0.0], [0.0, 110.0, 0.0]])
ADDED_2 = torch.tensor([[100.0, 6.0, -4.0], [300.0, 12.0, -8.0], [500.0, 18.0, -12.0]])


def test_without_an_adapter_the_layer_is_the_base() -> None:
    assert torch.equal(layer()(X), BASE)
    assert torch.equal(layer(RowGroup(3, None))(X), BASE), "this one leaves the layer as it is"


@pytest.mark.parametrize(("number", "added"), [(1, ADDED_1), (2, ADDED_2)])
def test_an_adapter_of_all_rows(number: int, added: torch.Tensor) -> None:
    assert torch.equal(layer(RowGroup(number, None))(X), BASE + added)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_adapters_of_some_rows_change_those_only(times: int) -> None:
    """Three, six and fifteen rows: fewer than four are padded."""
    first = torch.arange(0, 3 * times, 3)
    third = first + 2
    found = layer(RowGroup(1, first), RowGroup(2, third))(X.repeat(times, 1))
    expected = BASE.clone()
    expected[0] += ADDED_1[0]
    expected[2] += ADDED_2[2]
    assert torch.equal(found, expected.repeat(times, 1))


def test_the_adapter_computes_in_its_own_type() -> None:
    """The sum 1 + 2^-9 is lost in bfloat16, whose next number after 1 is 1 + 2^-7; a float32 adapter keeps it."""
    base = PlainLinear(torch.zeros(1, 2, dtype=torch.bfloat16))
    active = ActiveRows()
    active.groups = (RowGroup(1, None),)
    adapted = AdaptedLinear(base, active)
    a, b = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[512.0, -512.0]])
    adapted.adapters[1] = LowRank(a, (OutputPart(b, slice(0, 1), slice(0, 2)),))
    found = adapted(torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16))
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [[1.0]])


def test_what_follows_the_product_sees_the_adapter() -> None:
    adapted, expected, other = layer(RowGroup(1, rows(1))), BASE.clone(), torch.full((3, 3), 2.0)
    expected[1] += ADDED_1[1]
    assert torch.equal(adapted.times(X, other), expected * 2)
    assert torch.equal(adapted.plus(X, other), expected + 2)
    torch.testing.assert_close(adapted.silu(X), expected * expected.sigmoid())
    inner = (2 / torch.pi) ** 0.5 * (expected + 0.044715 * expected**3)
    torch.testing.assert_close(adapted.gelu_tanh(X), 0.5 * expected * (1 + inner.tanh()))
    assert torch.equal(other, torch.full((3, 3), 2.0))
