"""What a draft buffer refuses: foreign handles and corrupt memory. Each is one error, never a read out of range."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import pickle
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from buffer_children import NODE, SPEC, echo
from draft_requests import ROWS, ROWS_WITH_OPTIONS, open_here
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.layout import PROTOCOL_VERSION, Word, block_bytes
from engine.draft_buffer.target_endpoint import (
    BufferHandle,
    TargetEndpoint,
    create_draft_buffer,
    open_draft_buffer,
)
from engine.errors import ConfigError, DraftDown
from engine.sampling.logits_processor import BatchLogitsProcessor, LogitsProcessor


@pytest.mark.parametrize(
    ("change", "node_id", "gpu_uuid", "message"),
    [
        ({}, "node-b", None, "made on node node-a, opened on node-b"),
        ({}, NODE, "GPU-1", "made on GPU none, opened on GPU-1"),
        ({"gpu_uuid": "GPU-1"}, NODE, "GPU-2", "made on GPU GPU-1, opened on GPU-2"),
        ({"spec": dataclasses.replace(SPEC, max_rows=50)}, NODE, None, "its spec needs"),
        ({"spec": dataclasses.replace(SPEC, target_vocab=999)}, NODE, None, "vocab is 1000, expected 999"),
    ],
)
def test_a_draft_on_another_node_or_gpu_or_with_another_spec_is_refused(
    target: TargetEndpoint, change: dict[str, Any], node_id: str, gpu_uuid: str | None, message: str
) -> None:
    handle: BufferHandle = dataclasses.replace(pickle.loads(pickle.dumps(target.handle())), **change)
    with pytest.raises(ConfigError, match=message):
        open_draft_buffer(handle, node_id=node_id, gpu_uuid=gpu_uuid, timeout_s=2)
    assert not target.is_open


def test_another_version_is_refused(target: TargetEndpoint) -> None:
    handle = target.handle()
    newer = dataclasses.replace(handle.rendezvous, version=PROTOCOL_VERSION + 1)
    with pytest.raises(ConfigError, match="version"):
        open_draft_buffer(dataclasses.replace(handle, rendezvous=newer), node_id=NODE, gpu_uuid=None)


scribbles = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 511), st.integers(0, block_bytes(SPEC) - 1)),
        st.one_of(st.binary(min_size=1, max_size=16), st.just(b"\xff" * 8), st.just(b"\x00" * 8)),
    ),
    min_size=1,
    max_size=4,
)


def scribble(memory: mmap.mmap, damage: list[tuple[int, bytes]]) -> None:
    for offset, data in damage:
        end = min(offset + len(data), block_bytes(SPEC))
        memory[offset:end] = data[: end - offset]


@settings(max_examples=150)
@example(damage=[(40 * 8 + 8, b"\xff" * 8)], before=False)
@example(damage=[(48 * 8, b"\x00" * 8)], before=False)
@given(damage=scribbles, before=st.booleans())
def test_a_corrupt_response_never_harms_the_target(damage: list[tuple[int, bytes]], before: bool) -> None:
    target = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=1)
    draft = open_here(target)
    target.wait_open(5)

    def respond() -> None:
        request = draft.wait(10)
        assert request is not None
        if before:
            scribble(draft._memory.buffer, damage)
        draft.respond(echo(request), draft_s=0.0)
        if not before:
            scribble(draft._memory.buffer, damage)

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        response = target.ask(ROWS, deadline_s=0.2)
    except DraftDown:
        assert not target.alive
    else:
        assert len(response.rows) == len(ROWS)
        assert all(len(row.token_ids) <= 5 and all(0 <= t < 1000 for t in row.token_ids) for row in response.rows)
    thread.join()
    draft.close()
    target.close()


options_at = next(
    offset
    for memory in [mmap.mmap(-1, block_bytes(SPEC))]
    for block in [DraftBlock(memory, SPEC, epoch=1)]
    for _ in [block.write_request(1, ROWS_WITH_OPTIONS, ())]
    if (offset := memory.find(b"num_prompt")) > 0
)
"""Offset of the encoded request options in the block."""


@settings(max_examples=300)
@given(
    damage=st.one_of(
        scribbles,
        st.lists(
            st.tuples(st.integers(options_at - 2, options_at + 400), st.binary(min_size=1, max_size=3)),
            min_size=1,
            max_size=4,
        ),
    )
)
def test_a_corrupt_request_never_harms_the_draft(damage: list[tuple[int, bytes]]) -> None:
    target = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=1)
    draft = open_here(target)
    target.wait_open(5)
    target._block.write_request(1, ROWS_WITH_OPTIONS, (5,))
    scribble(target._memory.buffer, damage)
    request = None
    with contextlib.suppress(DraftDown):
        request = draft.wait(0)
    if request is not None:
        assert all(row.k <= 5 and all(0 <= token < 1000 for token in row.new_tokens) for row in request.rows)
        for options in [row.options for row in request.rows if row.options is not None]:
            # Whatever the options say now, applying them is harmless.
            logits_processor = LogitsProcessor(dataclasses.replace(options, grammar=None))
            logits_processor.follow((1, 2, 3, 4))
            batch_processor = BatchLogitsProcessor()
            batch_processor.add(0, logits_processor)
            batch_processor.apply(torch.zeros(1, 1000))
    draft.close()
    target.close()


@pytest.mark.parametrize(
    "blob",
    [
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"num_prompt": -1}),
        msgspec.msgpack.encode({"num_prompt": 1, "presence_penalty": float("nan")}),
        msgspec.msgpack.encode({"num_prompt": 1, "repetition_penalty": 0.0}),
        msgspec.msgpack.encode({"num_prompt": 1, "repetition_penalty": 1e-300}),
        msgspec.msgpack.encode({"num_prompt": 1, "presence_penalty": 1e300}),
        msgspec.msgpack.encode({"num_prompt": 1, "logit_bias": [[-1, 1.0]]}),
        msgspec.msgpack.encode({"num_prompt": 1, "grammar": {"kind": "prose", "text": ""}}),
    ],
)
def test_bytes_that_encode_no_options_end_the_draft(target: TargetEndpoint, blob: bytes) -> None:
    draft = open_here(target)
    target.wait_open(5)
    target._block.write_request(1, ROWS_WITH_OPTIONS[:1], ())
    target._block._arrays.options[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
    target._block._arrays.request_rows["num_options"][0] = len(blob)
    target._block._words[Word.REQUEST_OPTIONS] = len(blob)
    with pytest.raises(DraftDown, match="draft request 1 of epoch 3 is corrupt: options"):
        draft.wait(0)
    draft.close()
