"""The attention of the GPU path against the reference, through the contract of PyTorch's paged flash attention.

Promise: `VarlenAttention` passes arguments that FlashAttention 2 takes, and means the same spans as the reference.
"""

from __future__ import annotations

import pytest
import torch
import varlen_contract
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TokenRange, forward_input_of, scattered_blocks

from engine.core.step import ForwardInput
from engine.model.attention import ReferenceAttention
from engine.model.attention_varlen import VarlenAttention

CPU = torch.device("cpu")
PAGE = varlen_contract.PAGE
SPANS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 9)), st.sampled_from([0, 1, 200, 255, 256, 300, 600])),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", autouse=True)
def _contract() -> None:
    varlen_contract.register()


def forward_of(spans: list[tuple[int, int]]) -> tuple[ForwardInput, int]:
    """The input of spans of (rows, context), and the number of blocks it uses."""
    totals = [rows + context for rows, context in spans]
    num_blocks = sum(-(-total // PAGE) for total in totals) + 3
    blocks = scattered_blocks(totals, num_blocks=num_blocks, block_size=PAGE)
    parts = [
        TokenRange(range(total), context, total, owned)
        for (_, context), total, owned in zip(spans, totals, blocks, strict=True)
    ]
    return forward_input_of(parts, block_size=PAGE), num_blocks


@settings(max_examples=25, deadline=None)
@given(
    spans=SPANS,
    num_kv_heads=st.integers(1, 2),
    group_size=st.sampled_from([1, 4]),
    same_rows=st.booleans(),
    window=st.sampled_from([0, 0, 1, 5, 250]),
)
def test_varlen_equals_the_reference(
    spans: list[tuple[int, int]], num_kv_heads: int, group_size: int, same_rows: bool, window: int
) -> None:
    if same_rows:  # Plain decoding: one row per span, where the window is unlimited.
        spans = [(1, context) for _, context in spans]
    forward_input, num_blocks = forward_of(spans)
    generator = torch.Generator().manual_seed(len(spans))
    shape = (num_blocks, PAGE, num_kv_heads, 16)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(len(forward_input.token_ids), num_kv_heads * group_size, 16, generator=generator).bfloat16()
    fast, slow = VarlenAttention(device=CPU, window=window), ReferenceAttention(window=window)
    found = fast.attend(query, keys, values, fast.prepare(forward_input, block_size=PAGE))
    expected = slow.attend(query, keys, values, slow.prepare(forward_input, block_size=PAGE))
    assert (found.float() - expected.float()).abs().max().item() < 0.03


def test_plain_decoding_has_an_unlimited_window_and_verification_a_causal_one() -> None:
    """FlashAttention 2 splits the KV length only for one row per span and an unlimited window."""
    attention = VarlenAttention(device=CPU)
    decode, _ = forward_of([(1, 300), (1, 20)])
    verify, _ = forward_of([(1, 300), (4, 20)])
    assert attention.prepare(decode, block_size=PAGE).limits(0) == (-1, -1)
    assert attention.prepare(verify, block_size=PAGE).limits(0) == (-1, 0)
    assert attention.prepare(decode, block_size=PAGE).limits(64) == (63, 0)
