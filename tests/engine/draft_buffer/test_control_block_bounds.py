"""Every index of the control block: the largest value is accepted, the next one is refused, by writer and by reader."""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import pytest

from engine.draft.messages import REASONS, DraftRequest, DraftRequestRow, DraftResponseRow, encode_options
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.layout import BufferSpec, CorruptBlock, Word, block_bytes, fixed_words
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

SEQ, EPOCH = 7, 3
OPTIONS = TokenOptions(num_prompt=1, presence_penalty=0.5)
SPEC = BufferSpec(
    max_rows=3,
    max_k=2,
    max_request_tokens=6,
    max_released=4,
    draft_vocab=10,
    target_vocab=20,
    max_options=3 * len(encode_options(OPTIONS)),
    feature_rows=5,
    feature_width=1,
)
SAMPLING = RowSampling(1.0, 1.0, 7, 1, False)
ROWS = [DraftRequestRow(key, 0, (0, 19), 2, SAMPLING, options=OPTIONS, feature_rows=(-1, 4)) for key in range(3)]
RELEASED = (1, 2, 3, 4)
RESPONSE = [DraftResponseRow((0, 19), (0.0, 1.001), has_probs=True, reason=REASONS[-1])] * 3
"""Request and response reach every capacity exactly."""


@pytest.fixture
def block() -> DraftBlock:
    block = DraftBlock(mmap.mmap(-1, block_bytes(SPEC)), SPEC, EPOCH)
    block.initialize()
    return block


def written(block: DraftBlock) -> DraftRequest:
    """Write the largest request and the largest response."""
    block.write_request(SEQ, ROWS, RELEASED)
    request = block.read_request(SEQ)
    block.write_response(request, RESPONSE, 0.5)
    return request


def test_values_at_every_capacity_are_accepted(block: DraftBlock) -> None:
    assert written(block) == DraftRequest(EPOCH, SEQ, tuple(ROWS), RELEASED)
    response = block.read_response(SEQ, [2, 2, 2])
    assert response.rows == tuple(RESPONSE)
    assert response.draft_s == 0.5


def test_an_empty_request_and_response_are_accepted(block: DraftBlock) -> None:
    block.write_request(SEQ, [], [])
    request = block.read_request(SEQ)
    assert (request.rows, request.released) == ((), ())
    block.write_response(request, [], 0.0)
    assert block.read_response(SEQ, []).rows == ()


LONGER_OPTIONS = dataclasses.replace(OPTIONS, stop_token_ids=(1,))
TOO_LARGE_REQUESTS: list[tuple[list[DraftRequestRow], tuple[int, ...], str]] = [
    ([*ROWS, DraftRequestRow(9, 0, (), 0, SAMPLING)], (), "rows: 4 given, allowed are 3"),
    ([dataclasses.replace(ROWS[0], new_tokens=(1,) * 7, feature_rows=())], (), "new tokens: 7 given, allowed are 6"),
    (ROWS, (1, 2, 3, 4, 5), "released keys: 5 given, allowed are 4"),
    ([*ROWS[:2], dataclasses.replace(ROWS[2], options=LONGER_OPTIONS)], (), r"options bytes: \d+ given"),
    ([dataclasses.replace(ROWS[0], k=3)], (), "k: 3 given, allowed are 2"),
    ([dataclasses.replace(ROWS[0], new_tokens=(0, 20))], (), r"a new token id is outside 0\.\.19"),
    ([dataclasses.replace(ROWS[0], new_tokens=(-1, 0))], (), r"a new token id is outside 0\.\.19"),
    ([dataclasses.replace(ROWS[0], feature_rows=(0, 5))], (), r"2 feature rows for 2 new tokens, or not all within -1"),
    (
        [dataclasses.replace(ROWS[0], feature_rows=(-2, 0))],
        (),
        r"2 feature rows for 2 new tokens, or not all within -1",
    ),
    ([dataclasses.replace(ROWS[0], feature_rows=())], (), "0 feature rows for 2 new tokens"),
]


@pytest.mark.parametrize(("rows", "released", "message"), TOO_LARGE_REQUESTS)
def test_the_writer_refuses_a_request_just_above_a_capacity(
    block: DraftBlock, rows: list[DraftRequestRow], released: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        block.write_request(SEQ, rows, released)
    assert block.request_seq == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (RESPONSE[:2], "2 rows given, the request has 3"),
        ([*RESPONSE, DraftResponseRow()], "4 rows given, the request has 3"),
        ([*RESPONSE[:2], DraftResponseRow((1, 2, 3))], "tokens for request 2: 3 given, allowed are 2"),
        ([*RESPONSE[:2], DraftResponseRow(num_on_device=3)], "tokens for request 2: 3 given, allowed are 2"),
        ([*RESPONSE[:2], DraftResponseRow((20,))], r"a token id is outside 0\.\.19"),
        ([*RESPONSE[:2], DraftResponseRow((-1,))], r"a token id is outside 0\.\.19"),
    ],
)
def test_the_writer_refuses_a_response_that_does_not_fit(
    block: DraftBlock, rows: list[DraftResponseRow], message: str
) -> None:
    block.write_request(SEQ, ROWS, RELEASED)
    request = block.read_request(SEQ)
    with pytest.raises(ValueError, match=message):
        block.write_response(request, rows, 0.0)
    assert block.response_seq == 0


@pytest.mark.parametrize(
    ("word", "values", "message"),
    [
        (Word.REQUEST_SEQ, (SEQ - 1, SEQ + 1), "request seq is {}, expected 7"),
        (Word.REQUEST_EPOCH, (EPOCH - 1, EPOCH + 1), "request epoch is {}, expected 3"),
        (Word.REQUEST_ROWS, (4, -1), "request rows: {} found, allowed are 0..3"),
        (Word.REQUEST_TOKENS, (7, -1), "new tokens: {} found, allowed are 0..6"),
        (Word.REQUEST_RELEASED, (5, -1), "released keys: {} found, allowed are 0..4"),
        (
            Word.REQUEST_OPTIONS,
            (SPEC.max_options + 1, -1),
            f"options bytes: {{}} found, allowed are 0..{SPEC.max_options}",
        ),
    ],
)
def test_the_reader_refuses_a_request_word_just_out_of_range(
    block: DraftBlock, word: int, values: tuple[int, ...], message: str
) -> None:
    written(block)
    for value in values:
        block._words[word] = value
        with pytest.raises(CorruptBlock) as raised:
            block.read_request(SEQ)
        assert str(raised.value) == message.format(value)


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("new_tokens", 5, 20, "a new token id is outside 0..19"),
        ("new_tokens", 0, -1, "a new token id is outside 0..19"),
        ("feature_rows", 5, 5, "a feature row is outside -1..4"),
        ("feature_rows", 0, -2, "a feature row is outside -1..4"),
    ],
)
def test_the_reader_refuses_a_request_value_just_out_of_range(
    block: DraftBlock, array: str, index: int, value: int, message: str
) -> None:
    written(block)
    getattr(block._arrays, array)[index] = value
    with pytest.raises(CorruptBlock) as raised:
        block.read_request(SEQ)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k", 3, "k: 3 found, allowed are 0..2"),
        ("k", -1, "k: -1 found, allowed are 0..2"),
        ("num_new_tokens", 3, "rows claim 7 values of 6"),
        ("num_new_tokens", 1, "rows claim 5 values of 6"),
        ("num_new_tokens", -1, "rows claim 3 values of 6"),
        ("num_options", SPEC.max_options // 3 + 1, f"rows claim {SPEC.max_options + 1} values of {SPEC.max_options}"),
        ("start", -1, "draft request row 0: start -1, k 2 or stream key out of range"),
        ("learn_from", -2, "draft request row 0: learn_from -2 is below -1"),
        ("exit_threshold", 1.01, "draft request row 0: exit threshold 1.01 is not within 0 and 1"),
    ],
)
def test_the_reader_refuses_a_request_row_just_out_of_range(
    block: DraftBlock, field: str, value: Any, message: str
) -> None:
    written(block)
    block._arrays.request_rows[field][0] = value
    with pytest.raises(CorruptBlock) as raised:
        block.read_request(SEQ)
    assert str(raised.value) == message


def test_the_reader_refuses_lengths_that_are_negative_but_add_up(block: DraftBlock) -> None:
    written(block)
    block._arrays.request_rows["num_new_tokens"][:] = (-1, 5, 2)
    with pytest.raises(CorruptBlock, match="rows claim 6 values of 6"):
        block.read_request(SEQ)


@pytest.mark.parametrize(
    ("word", "values", "message"),
    [
        (Word.RESPONSE_SEQ, (SEQ - 1, SEQ + 1), "response seq is {}, expected 7"),
        (Word.RESPONSE_EPOCH, (EPOCH - 1, EPOCH + 1), "response epoch is {}, expected 3"),
        (Word.RESPONSE_ROWS, (2, 4), "response rows is {}, expected 3"),
        (Word.RESPONSE_TOKENS, (7, -1), "response tokens: {} found, allowed are 0..6"),
        (Word.RESPONSE_CONFIDENCES, (7, -1), "confidences: {} found, allowed are 0..6"),
    ],
)
def test_the_reader_refuses_a_response_word_just_out_of_range(
    block: DraftBlock, word: int, values: tuple[int, ...], message: str
) -> None:
    written(block)
    for value in values:
        block._words[word] = value
        with pytest.raises(CorruptBlock) as raised:
            block.read_response(SEQ, [2, 2, 2])
        assert str(raised.value) == message.format(value)


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("token_ids", 5, 20, "a token id is outside 0..19"),
        ("token_ids", 0, -1, "a token id is outside 0..19"),
        ("confidences", 1, 1.002, "draft response row: confidences (0.0, 1.002) not all within 0 and 1"),
        ("confidences", 0, -0.001, "draft response row: confidences (-0.001, 1.001) not all within 0 and 1"),
        ("confidences", 0, float("nan"), "draft response row: confidences (nan, 1.001) not all within 0 and 1"),
    ],
)
def test_the_reader_refuses_a_response_value_just_out_of_range(
    block: DraftBlock, array: str, index: int, value: float, message: str
) -> None:
    written(block)
    getattr(block._arrays, array)[index] = value
    with pytest.raises(CorruptBlock) as raised:
        block.read_response(SEQ, [2, 2, 2])
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_tokens", 3, "tokens of a row: 3 found, allowed are 0..2"),
        ("num_tokens", -1, "tokens of a row: -1 found, allowed are 0..2"),
        ("num_tokens", 1, "rows claim 5 values of 6"),
        ("num_confidences", 3, "rows claim 7 values of 6"),
        ("num_confidences", 1, "rows claim 5 values of 6"),
        ("reason", len(REASONS), f"reason: {len(REASONS)} found, allowed are 0..{len(REASONS) - 1}"),
        ("reason", -1, f"reason: -1 found, allowed are 0..{len(REASONS) - 1}"),
        ("num_on_device", 3, "tokens of a row on the device: 3 found, allowed are 0..2"),
        ("num_on_device", -1, "tokens of a row on the device: -1 found, allowed are 0..2"),
        ("num_on_device", 1, "draft response row: 2 tokens in the message, 1 on the device"),
    ],
)
def test_the_reader_refuses_a_response_row_just_out_of_range(
    block: DraftBlock, field: str, value: int, message: str
) -> None:
    written(block)
    block._arrays.response_rows[field][0] = value
    with pytest.raises(CorruptBlock) as raised:
        block.read_response(SEQ, [2, 2, 2])
    assert str(raised.value) == message


@pytest.mark.parametrize("draft_s", [-1e-9, float("inf"), float("nan")])
def test_the_reader_refuses_impossible_seconds(block: DraftBlock, draft_s: float) -> None:
    written(block)
    block._seconds[Word.RESPONSE_S] = draft_s
    with pytest.raises(CorruptBlock, match="draft seconds are"):
        block.read_response(SEQ, [2, 2, 2])


@pytest.mark.parametrize(("index", "name"), list(enumerate(fixed_words(SPEC, EPOCH))))
def test_the_reader_refuses_a_block_with_another_fixed_word(block: DraftBlock, index: int, name: str) -> None:
    """Version, epoch or a capacity of another process: nothing in the block can be read."""
    written(block)
    block.check_fixed()
    block._words[index] += 1
    for read in (lambda: block.read_request(SEQ), lambda: block.read_response(SEQ, [2, 2, 2]), block.check_fixed):
        with pytest.raises(CorruptBlock, match=f"^{name} is "):
            read()


def test_parents_that_are_no_tree_are_refused(block: DraftBlock) -> None:
    block.write_request(SEQ, ROWS, RELEASED)
    request = block.read_request(SEQ)
    tree = dataclasses.replace(RESPONSE[0], parents=(-1, -1))
    block.write_response(request, [RESPONSE[0], tree, RESPONSE[2]], 0.5)
    assert block.read_response(SEQ, [2, 2, 2]).rows == (RESPONSE[0], tree, RESPONSE[2])
    for place, wrong in ((2, 0), (2, -2), (3, 1), (3, 2**30)):  # The second row has places 2 and 3.
        block._arrays.parents[2:4] = (-1, -1)
        block._arrays.parents[place] = wrong
        with pytest.raises(CorruptBlock, match="parents: node"):
            block.read_response(SEQ, [2, 2, 2])
