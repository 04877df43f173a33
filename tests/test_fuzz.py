"""Bad input over the wire: bodies, headers, socket messages and shared memory of any content.

Promise: a clear error of the kind that is declared for it, never another exception, a hang, or a request left running.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import random
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from api_harness import COMPLETION
from fuzz_server import JSON_TYPE, URLS, Server
from fuzzing import sample
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.access import Access
from deployments.http.keys import KeyEntry, KeyRing, hash_key
from deployments.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.responses_api.requests import ResponsesBody
from engine.core.step import ForwardInput
from engine.draft.messages import DraftRequest, DraftRequestRow, DraftResponseRow
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.layout import BufferSpec, CorruptBlock, block_bytes
from engine.errors import EngineError, ShardDown
from engine.ipc.forward_ring import ForwardRing, ForwardRingSpec, ring_bytes
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    StepDeltas,
    SubmitCommand,
    decode_command,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import Delta, GrammarSpec, SamplingParams, Submit
from engine.sampling.row_sampling import RowSampling

KEY = "a key of sixteen characters or more"
BODIES = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, TokenizeChatBody, DetokenizeBody)
FIELDS = sorted({"nonsense", *(name for body in BODIES for name in body.model_fields)})
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320]),
    st.floats(allow_nan=False, allow_infinity=False),
)
WORDS_OF_CLIENTS = ["auto", "json_object", "function_call", "function_call_output", "message", "reasoning", "resp_1"]
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=12), st.sampled_from(WORDS_OF_CLIENTS))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=6), st.sampled_from(FIELDS)), inner)
    ),
    max_leaves=8,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)


SERVER = Server()
GUARDED = Server(Access(keys=KeyRing([KeyEntry(name="k", sha256=hash_key(KEY))])))


@sample(150)
@given(url=st.sampled_from(sorted(URLS)), changes=CHANGES)
def test_bodies_with_any_values(url: str, changes: dict[str, Any]) -> None:
    SERVER.check(SERVER.post(url, json.dumps(URLS[url] | changes).encode(), JSON_TYPE))


@sample(80)
@given(changes=CHANGES)
def test_bodies_that_continue_a_stored_response(changes: dict[str, Any]) -> None:
    first = SERVER.post("/v1/responses", json.dumps(URLS["/v1/responses"]).encode(), JSON_TYPE).json()
    body = URLS["/v1/responses"] | {"previous_response_id": first["id"]} | changes
    SERVER.check(SERVER.post("/v1/responses", json.dumps(body).encode(), JSON_TYPE))


@sample(120)
@given(
    method=st.sampled_from(["GET", "DELETE", "POST", "HEAD", "PUT"]),
    name=st.one_of(st.text(max_size=12), st.just(None)),
    rest=st.sampled_from(["", "/input_items", "/cancel", "/"]),
    query=st.dictionaries(st.sampled_from(["limit", "order", "after", "stream", "include"]), st.text(max_size=5)),
)
def test_stored_responses_of_any_name(method: str, name: str | None, rest: str, query: dict[str, str]) -> None:
    if name is None:
        name = SERVER.post("/v1/responses", json.dumps(URLS["/v1/responses"]).encode(), JSON_TYPE).json()["id"]
    url = f"/v1/responses/{quote(name, safe='')}{rest}"
    response = SERVER.send(method, url, params=query)
    if method != "HEAD":
        SERVER.check(response)


@sample(120)
@given(
    url=st.sampled_from(sorted(URLS)),
    cuts=st.lists(st.tuples(st.integers(0, 120), st.binary(max_size=4)), min_size=1, max_size=3),
)
def test_damaged_bodies(url: str, cuts: list[tuple[int, bytes]]) -> None:
    raw = json.dumps(URLS[url]).encode()
    for at, put in cuts:
        raw = raw[:at] + put + raw[at + len(put) :]
    SERVER.check(SERVER.post(url, raw, JSON_TYPE))


@sample(150)
@given(
    url=st.sampled_from(sorted(URLS)),
    depth=st.integers(1, 3000),
    opening=st.sampled_from(['{"a":', "[", '{"messages":[']),
)
def test_deep_bodies(url: str, depth: int, opening: str) -> None:
    SERVER.check(SERVER.post(url, (opening * depth).encode(), JSON_TYPE))


HEADER_NAMES = st.sampled_from(
    [b"authorization", b"origin", b"host", b"content-type", b"content-length", b"x-request-id", b"accept", b"x"]
)
HEADER_VALUES = st.one_of(
    st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b"")),
    st.sampled_from([b"Bearer " + KEY.encode(), b"bearer", b"null", b"http://localhost", b"application/json", b"[::1"]),
)


@sample(120)
@given(headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=4))
def test_headers_of_any_content(headers: list[tuple[bytes, bytes]]) -> None:
    response = GUARDED.post("/v1/completions", json.dumps(COMPLETION).encode(), headers)
    GUARDED.check(response)
    given_key = any(
        name == b"authorization" and value.split()[-1:] and KEY.encode() in value for name, value in headers
    )
    assert given_key or response.status_code != 200, "nobody without the key comes in"


SUBMIT = Submit(
    request_id="r",
    prompt=(1, 2, 3),
    sampling=SamplingParams(logit_bias=((5, 1.0),), grammar=GrammarSpec(kind="regex", text="a"), seed=3),
)
MESSAGES = [
    encode_frame(SubmitCommand(SUBMIT))[HEADER.size :],
    encode_frame(AbortCommand("r"))[HEADER.size :],
    encode_frame(StepDeltas((Delta(request_id="r", token_ids=(1, 2), finish_reason="stop"),)))[HEADER.size :],
]
PACKED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def damaged(raw: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    out = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        action, at = rng.randrange(4), rng.randrange(len(out) or 1)
        if action == 0 and out:
            out[at % len(out)] = rng.randrange(256)
        elif action == 1:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        elif action == 2:
            del out[at : at + rng.randint(1, 8)]
        else:
            out = out[: at + 1]
    return bytes(out)


@sample(300)
@given(
    payload=st.one_of(
        st.binary(max_size=40),
        PACKED.map(msgspec.msgpack.encode),
        st.tuples(st.sampled_from(MESSAGES), st.integers(0, 2**32)).map(lambda pair: damaged(*pair)),
    )
)
def test_socket_messages_decode_or_raise_engine_error(payload: bytes) -> None:
    for decode in (decode_command, decode_event):
        try:
            decode(payload)
        except EngineError as error:
            assert str(error)  # noqa: PT017 - both outcomes are fine, another exception is not


@sample(300)
@given(header=st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_frame_lengths_are_bounded(header: bytes) -> None:
    try:
        assert frame_len(header) <= 64 << 20
    except EngineError as error:
        assert "frame" in str(error)  # noqa: PT017


@sample(25)
@given(
    raw=st.lists(st.tuples(st.sampled_from(MESSAGES), st.integers(0, 2**32)), min_size=1, max_size=4),
    whole=st.booleans(),
)
def test_nonsense_ends_the_connection_and_abandons_its_requests(raw: list[tuple[bytes, int]], whole: bool) -> None:
    gone: list[bool] = []
    submitted: list[Submit] = []
    shard = ShardSocket(submit=submitted.append, abort=lambda _: None, abandon=lambda: gone.append(True))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(shard.path)
        for message, seed in raw:
            payload = damaged(message, seed)
            with contextlib.suppress(OSError):  # the connection may be closed already
                peer.sendall((HEADER.pack(len(payload)) if whole else b"") + payload)
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 10
        while not gone:
            assert time.monotonic() < deadline, "the connection was not closed"
            time.sleep(0.001)
    shard.close()
    assert all(isinstance(submit, Submit) for submit in submitted)


SPEC = BufferSpec(max_rows=3, max_k=4, max_request_tokens=16, max_released=4, draft_vocab=50)
WORDS = st.one_of(st.integers(-3, 70), st.integers(-(2**63), 2**63 - 1))


def corrupt(buffer: mmap.mmap, places: list[tuple[int, int]], num_words: int) -> None:
    words = np.frombuffer(buffer, dtype=np.int64)
    for at, value in places:
        words[at % min(num_words, len(words))] = value


def read_all(block: DraftBlock) -> None:
    """Read what both processes read in a step. Damage may raise only CorruptBlock."""
    reads: list[Callable[[], object]] = [lambda: block.read_request(1), lambda: block.read_response(1, [4, 2])]
    for read in reads:
        try:
            message = read()
        except CorruptBlock as error:
            assert str(error)  # noqa: PT017
            continue
        assert len(message.rows) <= SPEC.max_rows  # type: ignore[attr-defined]
        if isinstance(message, DraftRequest):
            assert all(0 <= row.k <= SPEC.max_k and max(row.new_tokens, default=0) < SPEC.vocab for row in message.rows)


@sample(250)
@given(places=st.lists(st.tuples(st.integers(0, 4000), WORDS), min_size=1, max_size=5), near=st.booleans())
def test_a_corrupt_draft_buffer_is_noticed_or_harmless(places: list[tuple[int, int]], near: bool) -> None:
    buffer = mmap.mmap(-1, block_bytes(SPEC))
    block = DraftBlock(buffer, SPEC, epoch=7)
    block.initialize()
    rows = [DraftRequestRow(key, 0, (1, 2, 3), k, RowSampling(1.0, 1.0, 7, 1, True)) for key, k in ((1, 4), (2, 2))]
    block.write_request(1, rows, [5])
    block.write_response(block.read_request(1), [DraftResponseRow((1, 2), (0.5, 0.5)), DraftResponseRow((3,))], 0.1)
    corrupt(buffer, places, 64 if near else 1 << 30)
    read_all(block)


@sample(250)
@given(places=st.lists(st.tuples(st.integers(0, 4000), WORDS), min_size=1, max_size=5), near=st.booleans())
def test_a_corrupt_forward_ring_is_noticed_or_in_bounds(places: list[tuple[int, int]], near: bool) -> None:
    spec = ForwardRingSpec(max_rows=8, max_spans=4, max_blocks_per_span=4)
    buffer = mmap.mmap(-1, ring_bytes(spec, 1))
    ring = ForwardRing(buffer, spec, 1)
    ring.initialize()
    few = np.arange(3, dtype=np.int32)
    forward_input = ForwardInput(few, few, few, few[1:2], few[2:3], few[:2].reshape(1, 2), few[:1])
    ring.write(1, 1, forward_input)
    corrupt(buffer, places, 64 if near else 1 << 30)
    try:
        _, found = ring.read(1)
    except ShardDown as error:
        assert "corrupt" in str(error)  # noqa: PT017
        return
    if found is not None:
        assert len(found.token_ids) <= spec.max_rows
        assert found.block_tables.shape[0] <= spec.max_spans
