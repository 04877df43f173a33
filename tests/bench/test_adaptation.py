"""The measurement of a draft that learns: its workload and its figures."""

from __future__ import annotations

from bench.adaptation.price import step_ms, trimmed
from bench.adaptation.run import tokens_per_step
from bench.adaptation.workload import prompts
from bench.load.client import Response


def response(*, num_tokens: int, num_accepted: int) -> Response:
    return Response(0.5, 1.5, num_tokens, 2 * num_accepted, num_accepted, 0)


def test_prompts_follow_from_the_seed_and_differ() -> None:
    made = prompts(200, 0)
    assert made == prompts(200, 0)
    assert len({*made, *prompts(200, 1)}) > 390
    assert all("JSON" in prompt and "{" not in prompt.split("Text:")[1] for prompt in made)


def test_a_step_yields_its_accepted_tokens_and_one_more() -> None:
    """31 tokens of which 20 were accepted come from 11 steps; the first of them is that of the first token."""
    assert tokens_per_step([response(num_tokens=31, num_accepted=20)]) == 31 / 11
    assert step_ms(response(num_tokens=31, num_accepted=20)) == 100.0
    assert tokens_per_step([]) == 0.0


def test_a_change_leaves_out_both_ends() -> None:
    """Of 0 to 9 the ends 0 and 9; the error is that of the values with the ends moved inwards."""
    mean, error = trimmed([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.0])
    assert mean == 4.5
    assert 0.9 < error < 1.2
