"""Random requests to a toy model, for Hypothesis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from engine.messages import SamplingParams, SpeculativeOptions, Submit


def prompts(vocab_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """1 to 20 tokens."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20).map(tuple)


def submits_lists(
    vocab_size: int,
    samplings: st.SearchStrategy[SamplingParams],
    speculatives: st.SearchStrategy[SpeculativeOptions],
) -> st.SearchStrategy[list[Submit]]:
    """1 to 6 requests with ids r0, r1, ..."""
    drawn = st.lists(st.tuples(prompts(vocab_size), samplings, speculatives), min_size=1, max_size=6)
    return drawn.map(
        lambda parts: [
            Submit(request_id=f"r{i}", prompt=prompt, sampling=sampling, speculative=speculative)
            for i, (prompt, sampling, speculative) in enumerate(parts)
        ]
    )


def asked_again(submits: Iterable[Submit]) -> list[Submit]:
    """The same requests under other ids."""
    return [replace(submit, request_id=f"{submit.request_id}'") for submit in submits]
