"""Parts of a draft by example: candidates drawn without replacement, and where a chain ends on the host."""

from __future__ import annotations

import math

import pytest
import torch

from engine.draft.chain import Chooser, settle
from engine.draft.messages import DraftRequestRow
from engine.draft.sequence import Drafting, DraftSequence
from engine.sampling.distribution import Purpose, gumbel, stream_seed
from engine.sampling.row_sampling import RowSampling

GREEDY, SAMPLED = RowSampling(0.0, 1.0, 1, 1, False), RowSampling(1.0, 1.0, 77, 4, False)
LOGITS = torch.tensor([[0.0, 1.0, 0.5, 0.2, -1.0], [2.0, 0.0, 0.1, 0.3, 0.2]])


def drafting(k: int, sampling: RowSampling = GREEDY, *, row_index: int = 0, threshold: float = 0.0) -> Drafting:
    """A row with two committed tokens, and KV slots for them and for all drafted tokens but the last."""
    request_row = DraftRequestRow(1, 0, (1, 2), k, sampling, exit_threshold=threshold)
    sequence = DraftSequence(1, 0, tokens=[1, 2], positions=list(range(2 + max(0, k - 1))))
    return Drafting(row_index, request_row, sequence, sampling, k, (), (), 0)


@pytest.mark.parametrize(
    ("threshold", "confidences", "token_ids", "num_slots"),
    [
        (0.0, (0.5, 0.5, 0.5), [5, 6, 7], 4),
        (0.5, (0.5, 0.5, 0.5), [5, 6], 4),  # the product falls below, and the token that it falls at is the last one
        (0.0, (0.5, math.nan, 0.9), [5], 3),  # no column was allowed; what follows means nothing
        (0.0, (math.nan, 0.9, 0.9), [], 2),
    ],
)
def test_a_row_gets_its_tokens_up_to_where_the_loop_would_have_stopped(
    threshold: float, confidences: tuple[float, ...], token_ids: list[int], num_slots: int
) -> None:
    row = drafting(3, threshold=threshold)
    settle(row, (5, 6, 7, 8), (*confidences, 0.1))
    assert (row.token_ids, row.confidences) == (token_ids, list(confidences[: len(token_ids)]))
    assert row.sequence.tokens == [1, 2, *token_ids]
    assert row.sequence.positions == list(range(num_slots))


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("vocab", [None, torch.tensor([9, 4, 7, 1, 3])])
def test_candidates_are_those_with_the_largest_perturbed_probabilities(
    num_rows: int, vocab: torch.Tensor | None
) -> None:
    """One drafted token is ahead of the sequence, which has two."""
    rows, logits = [drafting(4, SAMPLED, row_index=2)] * num_rows, LOGITS[:num_rows]
    probs = torch.zeros(3, 4, 5)
    found, confidences = Chooser(vocab).candidates(rows, logits, probs, depth=1, width=3)
    q = torch.softmax(logits, dim=-1)
    ids = torch.arange(5) if vocab is None else vocab
    noise = gumbel([stream_seed(77, 2 + 1, Purpose.DRAFT, 4)], ids)
    columns = (q.log() + noise).topk(3, dim=-1).indices
    assert torch.equal(found, ids[columns])
    torch.testing.assert_close(confidences, q.amax(dim=-1, keepdim=True).expand(-1, 3))
    torch.testing.assert_close(probs[2, 1], q[-1])
    greedy, certain = Chooser(vocab).candidates([drafting(4)] * num_rows, logits, probs, depth=1, width=2)
    likeliest = q.topk(2, dim=-1)
    assert torch.equal(greedy, ids[likeliest.indices])
    torch.testing.assert_close(certain, likeliest.values)
