"""The draft's computation: what each request row gets, what is computed again, and what is freed."""

from __future__ import annotations

import pytest
import torch
from fakes import ToyModel

from engine.core.block_pool import BlockPool
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.proposer import Proposer
from engine.messages import GrammarSpec
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

VOCAB, BLOCK, MAX_K = 7, 4, 6
GREEDY = RowSampling(0.0, 1.0, 1, 1, False)


class Draft:
    """A proposer over a toy model, with its pool and the number of tokens that each forward computes."""

    def __init__(self, *, num_blocks: int = 40, max_model_len: int = 100, prefix_cache: bool = False) -> None:
        self.model = ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK)
        self.pool = BlockPool(num_blocks, BLOCK, prefix_cache=prefix_cache)
        self.num_rows: list[int] = []

        def forward(forward_input: object) -> torch.Tensor:
            self.num_rows.append(len(forward_input.token_ids))  # type: ignore[attr-defined]
            return self.model.forward(forward_input)  # type: ignore[arg-type]

        self.proposer = Proposer(PlainArchitecture(forward), self.pool, vocab=None, max_model_len=max_model_len)
        self.probs = torch.zeros(4, MAX_K, VOCAB)

    def propose(self, *rows: DraftRequestRow, released: tuple[int, ...] = ()) -> tuple[DraftResponseRow, ...]:
        self.num_rows.clear()
        return self.proposer.propose(rows, released, self.probs)

    def greedy(self, tokens: list[int], k: int) -> tuple[int, ...]:
        """The greedy continuation of a text under the toy model."""
        text = list(tokens)
        for _ in range(k):
            text.append(int(self.model.logits_after(text).argmax()))
        return tuple(text[len(tokens) :])


def row(key: int, start: int, new_tokens: list[int], k: int, **changes: object) -> DraftRequestRow:
    return DraftRequestRow(key, start, tuple(new_tokens), k, GREEDY, **changes)  # type: ignore[arg-type]


def test_greedy_drafts_are_the_models_continuation() -> None:
    draft = Draft()
    first, second, third = draft.propose(row(1, 0, [1, 2, 3], 4), row(2, 0, [4], 1), row(3, 0, [5, 6], 0))
    assert first.token_ids == draft.greedy([1, 2, 3], 4)
    assert second.token_ids == draft.greedy([4], 1)
    assert third.token_ids == ()
    assert [len(response.confidences) for response in (first, second, third)] == [4, 1, 0]
    assert all(0 < confidence <= 1 for confidence in first.confidences)
    assert draft.num_rows == [6, 1, 1, 1]


def test_accepted_tokens_are_not_computed_again() -> None:
    draft = Draft()
    (response,) = draft.propose(row(1, 0, [1, 2, 3], 4))
    accepted = list(response.token_ids[:2])
    (response,) = draft.propose(row(1, 3, [*accepted, 0], 2))
    # The first three drafted tokens have KV slots; two of them were accepted, and only the new token is computed.
    assert draft.num_rows == [1, 1]
    assert response.token_ids == draft.greedy([1, 2, 3, *accepted, 0], 2)


def test_rejected_tokens_are_rolled_back() -> None:
    draft = Draft()
    (response,) = draft.propose(row(1, 0, [1, 2, 3], 4))
    other = (response.token_ids[0] + 1) % VOCAB
    (response,) = draft.propose(row(1, 3, [other], 3))
    assert response.token_ids == draft.greedy([1, 2, 3, other], 3)


def test_a_chunk_without_k_only_computes() -> None:
    draft = Draft()
    (response,) = draft.propose(row(1, 0, [1, 2, 3, 4, 5], 0))
    assert (response.token_ids, response.reason) == ((), "plan")
    assert draft.num_rows == [5]
    (response,) = draft.propose(row(1, 5, [6], 2))
    assert response.token_ids == draft.greedy([1, 2, 3, 4, 5, 6], 2)


def test_an_unknown_request_is_asked_for_from_the_start() -> None:
    draft = Draft()
    (response,) = draft.propose(row(1, 3, [1], 2))
    assert response == DraftResponseRow(reason="memory")


@pytest.mark.parametrize(("k", "fits"), [(6, True), (7, False)])
def test_the_longest_sequence_is_accepted_and_one_token_more_is_not(k: int, fits: bool) -> None:
    draft = Draft(max_model_len=10)
    draft.probs = torch.zeros(1, 7, VOCAB)
    (response,) = draft.propose(row(1, 0, [1, 2, 3, 4, 5], k))  # the last drafted token needs no slot
    assert response.reason == ("plan" if fits else "memory")
    assert len(response.token_ids) == (k if fits else 0)
    assert draft.pool.num_free == (39 - 3 if fits else 39), "ten slots, or none"


def test_a_block_of_four_slots_is_enough_for_four_tokens_and_one_drafted_after_them() -> None:
    draft = Draft(num_blocks=2)
    (response,) = draft.propose(row(1, 0, [1, 2, 3, 4], 1))
    assert response.token_ids == draft.greedy([1, 2, 3, 4], 1)


def test_a_full_pool_refuses_one_request_and_serves_the_next_after_a_release() -> None:
    draft = Draft(num_blocks=4)  # one scratch block and three others
    free = draft.pool.num_free
    first, second = draft.propose(row(1, 0, [1] * 9, 1), row(2, 0, [2], 1))
    assert (first.reason, second.reason) == ("plan", "memory")
    (second,) = draft.propose(row(2, 0, [2], 1), released=(1, 77))
    assert second.token_ids == draft.greedy([2], 1)
    draft.propose(released=(2,))
    assert draft.pool.num_free == free


def test_a_request_that_outgrows_the_pool_leaves_its_blocks_to_others() -> None:
    draft = Draft(num_blocks=4)
    free = draft.pool.num_free
    assert draft.propose(row(1, 0, [1] * 5, 1))[0].reason == "plan"
    assert draft.pool.num_free == free - 2
    assert draft.propose(row(1, 5, [1] * 8, 1))[0].reason == "memory"
    assert draft.pool.num_free == free


def test_a_restarted_request_forgets_its_earlier_text() -> None:
    draft = Draft()
    draft.propose(row(1, 0, [1, 2, 3], 4))
    (response,) = draft.propose(row(1, 0, [5, 6], 3))
    assert response.token_ids == draft.greedy([5, 6], 3)
    assert draft.pool.num_free == 39 - 1, "four slots"


def test_drafting_stops_below_the_exit_threshold() -> None:
    draft = Draft()
    (whole,) = draft.propose(row(1, 0, [1, 2, 3], MAX_K))
    products = [whole.confidences[0]]
    for confidence in whole.confidences[1:]:
        products.append(products[-1] * confidence)
    threshold = (products[1] + products[2]) / 2
    (short,) = draft.propose(row(2, 0, [1, 2, 3], MAX_K, exit_threshold=threshold))
    assert short.token_ids == whole.token_ids[:3]  # the third token falls below, and is the last one


def test_q_is_written_for_the_rejection_rule_only() -> None:
    draft = Draft()
    rejection = row(2, 0, [1, 2], 2)
    rejection = DraftRequestRow(2, 0, (1, 2), 2, RowSampling(1.0, 1.0, 5, 1, False))
    coupled = DraftRequestRow(3, 0, (1, 2), 2, RowSampling(1.0, 1.0, 5, 1, True))
    greedy, sampled, seeded = draft.propose(row(1, 0, [1, 2], 2), rejection, coupled)
    assert [response.has_probs for response in (greedy, sampled, seeded)] == [False, True, False]
    sums = draft.probs[:3, :2].sum(-1)
    torch.testing.assert_close(sums, torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))


def test_without_a_tokenizer_a_grammar_is_refused_and_the_others_are_served() -> None:
    draft = Draft()
    options = TokenOptions(num_prompt=1, grammar=GrammarSpec(kind="regex", text="a+"))
    refused, served = draft.propose(row(1, 0, [1], 2, options=options), row(2, 0, [1], 2))
    assert refused == DraftResponseRow(reason="options")
    assert draft.pool.num_free == 39 - 1, "two slots of the request that is served"
    assert served.token_ids == draft.greedy([1], 2)


def test_a_shared_prefix_is_computed_once() -> None:
    draft = Draft(prefix_cache=True)
    text = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    draft.propose(row(1, 0, text, 0))
    assert draft.num_rows == [9]
    (response,) = draft.propose(row(2, 0, text, 2))
    assert draft.num_rows[0] == 1  # two whole blocks are shared
    assert response.token_ids == draft.greedy(text, 2)
