"""The control block: every value survives, and every index just out of range is refused by writer and reader."""

from __future__ import annotations

import mmap
from typing import get_args

from buffer_children import SPEC
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.messages import REASONS, DraftRequest, DraftRequestRow, DraftResponseRow
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.layout import block_bytes
from engine.messages import GrammarKind, GrammarSpec
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling
from engine.tree import MAX_WIDTH

int64s = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(-1e6, 1e6)
token_options = st.builds(
    TokenOptions,
    num_prompt=st.integers(0, 2**31),
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=st.floats(1e-6, 1e6),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), finite), max_size=3).map(tuple),
    min_tokens=st.integers(0, 2**31),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    grammar=st.none() | st.builds(GrammarSpec, kind=st.sampled_from(get_args(GrammarKind)), text=st.text(max_size=20)),
)


@st.composite
def request_rows(draw: st.DrawFn) -> DraftRequestRow:
    start = draw(st.one_of(st.just(0), st.integers(0, 2**63 - 1)))
    return DraftRequestRow(
        key=draw(int64s),
        start=start,
        new_tokens=tuple(draw(st.lists(st.integers(0, 999), max_size=16))),
        k=draw(st.integers(0, 5)),
        sampling=RowSampling(
            temperature=draw(st.floats(0, 1e6)),
            top_p=draw(st.floats(0, 1, exclude_min=True)),
            stream_key=draw(st.integers(0, 2**64 - 1)),
            attempt=draw(int64s),
            coupled=draw(st.booleans()),
            top_k=draw(st.integers(0, 2**63 - 1)),
            min_p=draw(st.floats(0, 1)),
        ),
        options=draw(st.none() | token_options) if start == 0 else None,
        width=draw(st.integers(1, MAX_WIDTH)),
        learn_from=draw(st.integers(-1, 2**40)),
    )


@st.composite
def responses(draw: st.DrawFn, rows: list[DraftRequestRow]) -> list[DraftResponseRow]:
    response = []
    for row in rows:
        token_ids = draw(st.lists(st.integers(0, 999), max_size=row.k))
        size = draw(st.sampled_from([0, len(token_ids)]))
        confidences = draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.sampled_from([0, len(token_ids)]))))
        values = (tuple(token_ids), tuple(confidences), draw(st.booleans()), draw(st.sampled_from(REASONS)))
        response.append(DraftResponseRow(*values, parents=parents))
    return response


@given(
    rows=st.lists(request_rows(), max_size=4),
    released=st.lists(int64s, max_size=8),
    seq=st.integers(1, 2**62),
    draft_s=st.floats(0, 1e9),
    data=st.data(),
)
def test_every_value_survives_the_block(
    rows: list[DraftRequestRow], released: list[int], seq: int, draft_s: float, data: st.DataObject
) -> None:
    memory = mmap.mmap(-1, block_bytes(SPEC))
    writer, reader = DraftBlock(memory, SPEC, epoch=9), DraftBlock(memory, SPEC, epoch=9)
    writer.initialize()
    writer.write_request(seq, rows, released)
    request = reader.read_request(seq)
    assert request == DraftRequest(9, seq, tuple(rows), tuple(released))
    rows_out = data.draw(responses(rows))
    reader.write_response(request, rows_out, draft_s)
    response = writer.read_response(seq, [row.k for row in rows])
    assert (response.epoch, response.seq, list(response.rows), response.draft_s) == (9, seq, rows_out, draft_s)


def test_the_target_is_idle_from_the_end_of_a_step_on() -> None:
    block = DraftBlock(mmap.mmap(-1, block_bytes(SPEC)), SPEC, 1)
    assert block.idle_s == 0.0  # no step yet
    block.mark_step(runs=True)
    assert block.idle_s == 0.0
    block.mark_step(runs=False)
    first = block.idle_s
    assert 0.0 < first < block.idle_s
    block.mark_step(runs=True)
    assert block.idle_s == 0.0
