"""The logits processor of one request and of a batch: its state along tokens and drafts, and the changed logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from byte_grammar import END, byte_grammars

from engine.messages import GrammarSpec
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns, LogitsProcessor
from engine.sampling.penalties import TokenOptions

INF = math.inf
REGEX = GrammarSpec(kind="regex", text="ab?")
A, B = ord("a"), ord("b")


def edits_of(processor: LogitsProcessor) -> dict[int, float]:
    edits = processor.edits()
    return {} if edits is None else dict(zip(edits.token_ids.tolist(), edits.offset.tolist(), strict=True))


def test_tokens_are_followed_pushed_and_taken_back() -> None:
    processor = LogitsProcessor(TokenOptions(num_prompt=2, presence_penalty=0.5, min_tokens=2))
    processor.follow([7, 8, 3])
    assert (processor.num_tokens, edits_of(processor), processor.forbids_stop) == (3, {3: 0.5}, True)
    assert processor.push(4)
    assert (processor.num_tokens, edits_of(processor), processor.forbids_stop) == (4, {3: 0.5, 4: 0.5}, False)
    processor.rewind(4)
    assert processor.num_tokens == 4, "there is nothing behind it"
    processor.rewind(3)
    assert (processor.num_tokens, edits_of(processor)[4]) == (3, 0.0)
    processor.follow([7, 8, 3, 5, 6])
    assert (processor.num_tokens, edits_of(processor)) == (5, {3: 0.5, 4: 0.0, 5: 0.5, 6: 0.5})
    processor.rewind(1)
    assert processor.num_tokens == 1
    assert set(edits_of(processor).values()) == {0.0}
    assert not processor.has_ended


def test_a_grammar_begins_after_the_prompt_and_stops_the_state_at_what_it_does_not_allow() -> None:
    options = TokenOptions(num_prompt=1, grammar=REGEX, stop_token_ids=(END,))
    processor = LogitsProcessor.make(options, byte_grammars())
    processor.follow([B, A, A, B])
    assert processor.num_tokens == 2, "the second a is not allowed"
    assert not processor.push(A)
    assert processor.push(B)
    assert processor.push(END)
    assert processor.has_ended
    assert processor.stop_token_ids == (END,)
    processor.rewind(2)
    assert not processor.has_ended
    assert processor.push(B)
    processor.rewind(0)
    processor.follow([B, A])
    assert processor.num_tokens == 2


def test_without_a_compiler_a_grammar_is_left_out() -> None:
    options = TokenOptions(num_prompt=0, grammar=REGEX)
    assert LogitsProcessor.make(options, None).matcher is None
    assert LogitsProcessor.make(TokenOptions(num_prompt=0), byte_grammars()).matcher is None
    assert LogitsProcessor.make(options, byte_grammars()).matcher is not None


def test_the_columns_of_a_reduced_vocabulary() -> None:
    columns = Columns(torch.tensor([4, 0, 7]))
    assert columns.of(np.array([0, 1, 4, 7, 8, 100])).tolist() == [1, -1, 0, 2, -1, -1]


def processors() -> list[LogitsProcessor]:
    """Of rows 0 and 2: a bias, and both penalties after token 1."""
    biased = LogitsProcessor(TokenOptions(num_prompt=0, logit_bias=((0, 1.5), (3, -1.0), (9, 5.0))))
    penalized = LogitsProcessor(TokenOptions(num_prompt=0, repetition_penalty=2.0, frequency_penalty=0.25))
    penalized.follow([1, 2, 1])
    return [biased, penalized]


def applied(
    columns: Columns | None, logits: list[list[float]], *rows: tuple[int, LogitsProcessor]
) -> list[list[float]]:
    batch = BatchLogitsProcessor(columns)
    for row, processor in rows:
        batch.add(row, processor)
    changed = torch.tensor(logits)
    batch.apply(changed)
    values: list[list[float]] = changed.tolist()
    return values


def test_single_logits_are_biased_then_divided_or_multiplied_then_lowered() -> None:
    biased, penalized = processors()
    logits = [[1.0, 2.0, -3.0, 4.0]] * 3
    assert applied(None, logits, (0, biased), (2, penalized)) == [
        [2.5, 2.0, -3.0, 3.0],
        [1.0, 2.0, -3.0, 4.0],
        [1.0, 2.0 / 2 - 0.5, -3.0 * 2 - 0.25, 4.0],
    ]
    assert applied(Columns(torch.tensor([3, 1])), [[1.0, 2.0]] * 3, (0, biased), (2, penalized)) == [
        [0.0, 2.0],
        [1.0, 2.0],
        [1.0, 0.5],
    ]
    assert applied(None, logits) == logits


def test_a_grammar_s_mask_is_applied_to_its_row() -> None:
    options = TokenOptions(num_prompt=0, grammar=REGEX, stop_token_ids=(END,), min_tokens=2)
    processor = LogitsProcessor.make(options, byte_grammars())
    num_tokens = END + 1

    def allowed(columns: Columns | None, width: int) -> list[list[int]]:
        rows = applied(columns, [[0.0] * width] * 2, (1, processor))
        return [[column for column, value in enumerate(row) if value > -INF] for row in rows]

    assert allowed(None, num_tokens) == [list(range(num_tokens)), [A]]
    assert allowed(Columns(torch.tensor([B, A, END])), 3) == [[0, 1, 2], [1]]
    processor.follow([A])
    assert allowed(None, num_tokens)[1] == [B], "min_tokens forbids the end"
    processor.follow([A, B])
    assert allowed(None, num_tokens)[1] == [END]
    assert allowed(Columns(torch.tensor([B, A])), 2)[1] == []


@pytest.mark.parametrize(
    ("options", "can"),
    [
        (TokenOptions(num_prompt=0, presence_penalty=1.0), False),
        (TokenOptions(num_prompt=0, min_tokens=1, stop_token_ids=(1,)), True),
        (TokenOptions(num_prompt=0, grammar=REGEX), True),
    ],
)
def test_which_options_can_exclude_every_token(options: TokenOptions, can: bool) -> None:
    batch = BatchLogitsProcessor()
    assert not batch.can_exclude_all
    batch.add(0, LogitsProcessor.make(options, byte_grammars()))
    assert batch.can_exclude_all is can
