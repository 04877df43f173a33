"""Facts of a batch: limits of K per request, unread tokens, and mean lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoscale.policy.batch_facts import BatchObserver
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import SamplingParams, SpeculativeOptions, Submit

MAX_K = 4


def request(
    key: int, *, num_prompt: int = 10, max_tokens: int = 100, temperature: float = 0.0, **options: object
) -> Request:
    submit = Submit(
        request_id=str(key),
        prompt=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        speculative=SpeculativeOptions(**options),  # type: ignore[arg-type]
    )
    return Request(submit=submit, key=key, stream_key=0, tokens=[1] * num_prompt)


def refreshed(*requests: Request) -> BatchObserver:
    observer = BatchObserver(MAX_K)
    observer.refresh(requests, [each.key for each in requests])
    return observer


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 4),
        ({"enabled": False}, 0),
        ({"max_k": 2}, 2),
        ({"max_k": 9}, 4),
        ({"max_tokens": 3}, 2),
        ({"max_tokens": 1}, 0),
    ],
)
def test_positions_past_the_limit_of_a_request_are_disallowed(options: dict[str, object], limit: int) -> None:
    """Of the tokens that are left, one comes from the target itself."""
    facts = refreshed(request(1, **options), request(2)).facts  # type: ignore[arg-type]
    expected = [[position >= limit for position in range(MAX_K)], [False] * MAX_K]
    if limit == MAX_K:
        assert facts.disallowed is None
    else:
        assert facts.disallowed is not None
        assert facts.disallowed.tolist() == expected


def test_workloads_are_indexed_for_arrays_and_lists() -> None:
    facts = refreshed(request(1), request(2, temperature=1.0)).facts
    assert list(facts.workloads) == [0, 2]
    assert np.array_equal(facts.workload_indices, [0, 2])


def test_unread_tokens_are_those_of_requests_less_what_the_draft_has_read() -> None:
    """One token per request is subtracted, because the next step's draft request carries it."""
    observer = refreshed(request(1), request(2, num_prompt=30))
    assert observer.facts.num_unread == 10 + 30 - 2
    observer.observe([RowOutcome(1, 2, 1, 10), RowOutcome(2, 2, 1, 25)], ())
    assert observer.num_tracked == 2
    observer.refresh([request(1), request(2, num_prompt=30)], [1, 2])
    assert observer.facts.num_unread == 10 + 30 - 10 - 25 - 2
    observer.observe([], (1, 2))
    assert observer.num_tracked == 0


def test_catching_up_is_the_share_of_prompts_and_of_unread_tokens() -> None:
    """A first prompt of 10 tokens and a response of 128: 3 * (1 + 10 / 128), and 9 unread tokens over 64 steps."""
    assert refreshed(request(1)).catch_up_tokens(3.0) == pytest.approx(3 * (1 + 10 / 128) + 9 / 64)


def test_mean_lengths_follow_requests_that_are_new_or_ended() -> None:
    """The second prompt has a weight of 5 %, and so has the first response."""
    first = request(1, num_prompt=10)
    observer = refreshed(first)
    first.tokens += [1] * 28
    first.finish_reason = "stop"
    observer.refresh([replace(request(2, num_prompt=110))], [2])
    prompt_len, response_len = 10 + 0.05 * 100, 128 + 0.05 * (28 - 128)
    unread = observer.facts.num_unread / 64
    assert observer.catch_up_tokens(1.0) == pytest.approx(1 + prompt_len / response_len + unread)


@pytest.mark.parametrize(("num_generated", "limit"), [(0, 3), (1, 2), (2, 1), (3, 0), (9, 0)])
def test_the_limit_falls_with_each_generated_token(num_generated: int, limit: int) -> None:
    one = request(1, max_tokens=4)
    one.tokens += [1] * num_generated
    facts = refreshed(one).facts
    assert facts.disallowed is not None
    assert facts.disallowed.tolist() == [[position >= limit for position in range(MAX_K)]]
