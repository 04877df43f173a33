"""Rejection of drafted tokens at the edges: tokens that the target excludes, and numbers of exactly zero or p over q.

The rules in general are compared with their twin in tests/engine/core/test_acceptance_twins.py.
"""

from __future__ import annotations

import pytest
import torch

from engine.sampling.rejection import DraftProbs, DraftTable, compare, reject

WORDS = torch.zeros(1, 3, 2, dtype=torch.int32)


def drafts(*token_ids: int) -> DraftTable:
    return DraftTable(torch.tensor([token_ids]), torch.tensor([len(token_ids)]), torch.tensor([0]))


def certain(num: int) -> DraftProbs:
    return DraftProbs(None, torch.zeros(1, num, dtype=torch.int64), torch.zeros(1, num, dtype=torch.bool), None)


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 4).float()


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_a_token_that_the_target_excludes_is_rejected_whatever_the_number(number: float) -> None:
    uniforms = torch.full((1, 2), number, dtype=torch.float64)
    outcome = reject(one_hot(1, 2, 3), drafts(0, 2), certain(2), uniforms, WORDS)
    assert (outcome.num_accepted.tolist(), outcome.last_token.tolist()) == ([0], [1])
    assert outcome.emitted(drafts(0, 2)).tolist() == [[1, 1, 1]]


def test_tokens_that_the_target_is_certain_of_are_accepted_and_followed_by_a_bonus() -> None:
    uniforms = torch.full((1, 2), 1 - 2.0**-53, dtype=torch.float64)
    outcome = reject(one_hot(1, 2, 3), drafts(1, 2), certain(2), uniforms, WORDS)
    assert (outcome.num_accepted.tolist(), outcome.last_token.tolist()) == ([2], [3])
    assert outcome.emitted(drafts(1, 2)).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("number", "accepted"), [(0.0, 1), (0.49, 1), (0.5, 0), (0.51, 0)])
def test_a_token_is_accepted_below_p_over_q(number: float, accepted: int) -> None:
    """p = 0.25 and q = 0.5, for the last column as well."""
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25]] * 2)
    q = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    for token in (1, 3):
        probs = DraftProbs(q, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[True]]), None)
        uniforms = torch.tensor([[number]], dtype=torch.float64)
        outcome = reject(p, drafts(token), probs, uniforms, WORDS[:, :2])
        assert outcome.num_accepted.tolist() == [accepted]
        assert accepted or outcome.last_token.tolist()[0] in (0, 2), "p exceeds q there only"


def test_drafts_are_accepted_as_long_as_they_equal_the_choices() -> None:
    table = DraftTable(torch.tensor([[5, 6], [7, -1]]), torch.tensor([2, 1]), torch.tensor([0, 3]))
    outcome = compare(torch.tensor([5, 9, 1, 7, 8]), table)
    assert (outcome.num_accepted.tolist(), outcome.last_token.tolist()) == ([1, 1], [9, 8])
    assert outcome.emitted(table).tolist() == [[5, 9, 9], [7, 8, 8]]
