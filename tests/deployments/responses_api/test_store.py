"""Stored responses: bounds for each client, and continuing one is the same as sending the whole conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import openai
import pytest
from api_harness import CODEC, EOS, LIMITS, TEXT, dependencies, error_of, make_engine, post, tool_codec
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_level

from deployments.errors import ResponseNotFound
from deployments.http.access import Access
from deployments.http.app import build_api
from deployments.http.keys import KeyEntry, KeyRing, hash_key
from deployments.responses_api.store import ResponseStore, StoredResponse
from deployments.settings import StoredResponsesSettings
from deployments.text.tokenizer import TextCodec
from engine.errors import EngineError

T = TypeVar("T")
BODY = {"model": "tiny", "input": "go"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
KEYS = {name: f"{name}, a key of sixteen characters" for name in ("ann", "bob")}


def talk(
    engine: Any,
    work: Callable[[openai.AsyncOpenAI], Awaitable[T]],
    codec: TextCodec = CODEC,
    *,
    settings: StoredResponsesSettings | None = None,
    has_keys: bool = False,
) -> T:
    """Run `work` with a client of a new application that stores responses."""

    async def run() -> T:
        store = ResponseStore(settings or StoredResponsesSettings())
        needed = replace(dependencies(engine, codec, replace(LIMITS, max_model_len=4096)), responses=store)
        keys = [KeyEntry(name=name, sha256=hash_key(key)) for name, key in KEYS.items()]
        access = Access(keys=KeyRing(keys)) if has_keys else None
        transport = httpx.ASGITransport(build_api(needed, access))
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key=KEYS["ann"], max_retries=0, http_client=http
            )
            return await work(client)

    return asyncio.run(run())


def stored(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(response_id=name, response=b"r" * size, input_items=(), output_items=())


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(
    puts=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 700)), max_size=30),
    max_responses=st.integers(1, 5),
)
def test_the_bounds_hold_for_each_client(puts: list[tuple[str, int, int]], max_responses: int) -> None:
    store = ResponseStore(StoredResponsesSettings(max_responses=max_responses, max_bytes=1024))
    expected: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    for client, name, size in puts:
        kept = expected[client]
        store.put(client, stored(str(name), size))
        kept.pop(str(name), None)
        kept[str(name)] = size
        while len(kept) > max_responses or sum(kept.values()) > 1024:
            del kept[next(iter(kept))]
    for client, kept in expected.items():
        assert store.num_bytes(client) == sum(kept.values())
        for name in map(str, range(10)):
            if name in kept:
                assert store.get(client, name).num_bytes == kept[name]
            else:
                with pytest.raises(ResponseNotFound, match=f"'{name}' is stored here"):
                    store.get(client, name)


def test_responses_go_after_their_age_and_when_deleted() -> None:
    clock = Clock()
    store = ResponseStore(StoredResponsesSettings(max_age_s=10), clock)
    store.put("a", stored("old"))
    clock.now_s = 6
    store.put("a", stored("new"))
    clock.now_s = 11
    with pytest.raises(ResponseNotFound):
        store.get("a", "old")
    store.get("a", "new")
    store.delete("a", "new")
    with pytest.raises(ResponseNotFound):
        store.delete("a", "new")
    store.put("a", stored("idle"))
    clock.now_s = 30
    store.put("b", stored("other"))
    assert store.num_bytes("a") == 0, "another client's request frees what is too old"


def test_a_response_that_exceeds_the_bound_by_itself_is_not_kept() -> None:
    store = ResponseStore(StoredResponsesSettings(max_bytes=1024))
    store.put("a", stored("large", 2000))
    assert store.num_bytes("a") == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_continuing_a_response_is_sending_the_whole_conversation(is_stream: bool) -> None:
    codec = tool_codec("hermes")
    engine = make_engine(script=codec.encode(f"Let me see.\n{CALL}"))
    result = {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "sunny"}]}
    question = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}

    async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
        if not is_stream:
            return await client.responses.create(model="tiny", tools=[TOOL], **fields)
        events = [e async for e in await client.responses.create(model="tiny", tools=[TOOL], stream=True, **fields)]
        return events[-1].response

    async def work(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, input=[question], instructions="be brief")
        second = await ask(client, input=[result], previous_response_id=first.id)
        third = await ask(client, input="and?", previous_response_id=second.id, store=False)
        assert (first.store, second.store, third.store) == (True, True, False)
        assert [r.previous_response_id for r in (first, second, third)] == [None, first.id, second.id]
        output = [[item.model_dump(mode="json") for item in response.output] for response in (first, second)]
        # Instructions are not taken over, as in OpenAI's interface.
        history = [question, *output[0], result, *output[1], {"role": "user", "content": "and?"}]
        await ask(client, input=history)
        assert engine.submitted[2].prompt == engine.submitted[3].prompt
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
        assert items[0].content[0].text == "a\nb"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)

    talk(engine, work, codec)


def test_thoughts_are_part_of_what_is_continued() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template += "{# <think></think> #}"
    codec = TextCodec(tokenizer, eos_token_ids=[EOS])

    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(**BODY)
        assert [item.type for item in first.output] == ["reasoning", "message"]
        second = await client.responses.create(**BODY, previous_response_id=first.id)
        items = (await client.responses.input_items.list(second.id, order="asc")).data
        assert [item.type for item in items] == ["message", "reasoning", "message", "message"]

    talk(make_engine(script=codec.encode("<think>\nhm\n</think>\n\nyes")), work, codec)


def test_a_stored_response_is_read_as_it_was_and_deleted() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(**BODY, include=["message.output_text.logprobs"], metadata={"a": "b"})
        again = await client.responses.retrieve(first.id)
        assert again.model_dump() == first.model_dump()
        assert (again.output_text, again.metadata) == (TEXT, {"a": "b"})
        assert not (await client.responses.input_items.list(first.id)).has_more
        await client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="is stored here"):
                await call(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**BODY, previous_response_id=first.id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")

    talk(make_engine(), work)


def test_items_are_listed_in_parts() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        items = [{"role": "user", "content": text} for text in "abc"]
        response = await client.responses.create(model="tiny", input=items)
        page = await client.responses.input_items.list(response.id, limit=2)
        assert [item.content[0].text for item in page.data] == ["c", "b"]
        assert page.has_more
        page = await client.responses.input_items.list(response.id, limit=2, after=page.data[-1].id)
        assert [item.content[0].text for item in page.data] == ["a"]
        for bad in ({"after": "nonsense"}, {"limit": 0}, {"limit": 101}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(bad))):
                await client.responses.input_items.list(response.id, **bad)

    talk(make_engine(), work)


def test_a_key_never_reaches_the_responses_of_another_one() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(**BODY)
        other = client.with_options(api_key=KEYS["bob"])
        for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(**BODY, previous_response_id=first.id)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="x").responses.retrieve(first.id)
        assert (await client.responses.retrieve(first.id)).id == first.id

    talk(make_engine(), work, has_keys=True)


def test_an_id_that_the_client_sends_does_not_replace_a_response() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        headers = {"x-request-id": "one/two"}
        first, second = [await client.responses.create(**BODY, extra_headers=headers) for _ in range(2)]
        assert first.id != second.id
        assert (await client.responses.retrieve(first.id)).id == first.id

    talk(make_engine(), work)


def test_a_response_that_failed_is_not_stored() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        events = [event async for event in await client.responses.create(**BODY, stream=True)]
        assert events[-1].type == "response.failed"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(events[-1].response.id)

    talk(make_engine(fail_after=8, failure=EngineError("the step failed")), work)


def test_without_a_store_everything_is_refused_by_name() -> None:
    response = post(make_engine(), "/v1/responses", {**BODY, "previous_response_id": "resp_1"})
    assert error_of(response)["message"] == (
        "previous_response_id is not supported: this server stores no responses; send the whole conversation as input"
    )

    async def work(client: httpx.AsyncClient) -> None:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            answer = await client.request(method, f"/v1/responses/resp_1{path}")
            assert answer.status_code == 404
            assert "stores no responses; see the setting stored_responses" in answer.text

    async def run() -> None:
        transport = httpx.ASGITransport(build_api(dependencies(make_engine())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await work(client)

    asyncio.run(run())


def test_a_stream_of_a_stored_response_is_refused() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(**BODY)
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            await client.responses.retrieve(first.id, stream=True)

    talk(make_engine(), work)


def test_log_probabilities_are_no_part_of_the_conversation() -> None:
    sizes = []
    for fields in ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 5}):
        engine = make_engine()

        async def work(client: openai.AsyncOpenAI, fields: dict[str, Any] = fields) -> str:
            first = await client.responses.create(**BODY, **fields)
            second = await client.responses.create(**BODY, previous_response_id=first.id)
            items = await client.responses.input_items.list(second.id)
            return json.dumps([item.model_dump(exclude={"id"}) for item in items.data])

        sizes.append(len(talk(engine, work)))
    assert sizes[0] == sizes[1]
