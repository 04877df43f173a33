"""The logit edits of one request, without a model."""

from __future__ import annotations

import pytest

from engine.sampling.penalties import Penalties, TokenOptions


@pytest.mark.parametrize("num", [1, 16, 17, 300])
def test_any_number_of_biases_is_applied(num: int) -> None:
    bias = tuple((2 * token, token - 150.5) for token in range(num))
    edits = Penalties(TokenOptions(num_prompt=1, logit_bias=bias)).edits()
    assert edits is not None
    assert list(zip(edits.token_ids.tolist(), edits.bias.tolist(), strict=True)) == list(bias)
