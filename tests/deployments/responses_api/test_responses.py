"""/v1/responses through the `openai` client: typed events in order, items that can be sent back, refusals by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import openai
import pydantic
import pytest
from api_harness import CODEC, EOS, LIMITS, TEXT, dependencies, error_of, make_engine, post, tool_codec
from openai.types.responses import Response
from tiny_tokenizer import byte_level

from deployments.http.app import build_api
from deployments.text.tokenizer import TextCodec
from engine.errors import EngineError, QueueFull

T = TypeVar("T")
BODY = {"model": "tiny", "input": "go"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'


def talk(engine: Any, work: Callable[[openai.AsyncOpenAI], Awaitable[T]], codec: TextCodec = CODEC) -> T:
    """Run `work` with an `openai` client of a fresh application."""

    async def run() -> T:
        limits = LIMITS if codec is CODEC else replace(LIMITS, max_model_len=2048)
        transport = httpx.ASGITransport(build_api(dependencies(engine, codec, limits)))
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)
            return await work(client)

    return asyncio.run(run())


def stream(engine: Any, codec: TextCodec = CODEC, **fields: Any) -> list[Any]:
    """The events of a stream, each checked against the client's types."""

    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(**{**BODY, **fields}, stream=True)]

    events = talk(engine, work, codec)
    for event in events:
        type(event).model_validate(event.model_dump(mode="json", warnings=False, exclude_unset=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def whole(engine: Any, codec: TextCodec = CODEC, **fields: Any) -> Response:
    return talk(engine, lambda client: client.responses.create(**{**BODY, **fields}), codec)


def test_a_text_response_whole_and_streamed() -> None:
    response = whole(make_engine(), instructions="be brief", metadata={"a": "b"})
    Response.model_validate(response.model_dump(mode="json", warnings=False, exclude_unset=True))
    assert response.output_text == TEXT
    assert (response.status, response.error, response.store) == ("completed", None, False)
    assert (response.instructions, response.metadata) == ("be brief", {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    events = stream(make_engine())
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == TEXT
    assert events[-1].response.output_text == TEXT
    assert events[-1].response.usage == whole(make_engine()).usage


def test_an_end_by_length_is_incomplete() -> None:
    response = whole(make_engine(), max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert stream(make_engine(), max_output_tokens=3)[-1].type == "response.incomplete"


def test_calls_are_items_whose_arguments_are_streamed() -> None:
    codec = tool_codec("hermes")
    script = codec.encode(f"Let me see.\n{CALL}")
    response = whole(make_engine(script=script), codec, tools=[TOOL])
    message, call = response.output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris 🙂"}')
    assert (message.status, call.status) == ("completed", "completed")
    events = stream(make_engine(script=script), codec, tools=[TOOL])
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call.arguments
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.arguments, done.output_index) == (call.arguments, 1)


def test_output_can_be_sent_back_as_input() -> None:
    codec = tool_codec("hermes")
    first = whole(make_engine(script=codec.encode(CALL)), codec, tools=[TOOL])
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        *(item.model_dump(mode="json") for item in first.output),
        {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"},
    ]
    engine = make_engine()
    whole(engine, codec, input=items, tools=[TOOL], instructions="be brief")
    prompt = codec.decode(engine.submitted[0].prompt)
    for part in ("system\nbe brief", "user\nweather?", 'weather {"city": "Paris', "tool\nsunny"):
        assert part in prompt


def thinking_codec() -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template += "{# <think></think> #}"
    return TextCodec(tokenizer, eos_token_ids=[EOS])


def test_thoughts_are_items() -> None:
    codec = thinking_codec()
    script = codec.encode("<think>\nhm, well\n</think>\n\nyes")
    thoughts, message = whole(make_engine(script=script), codec).output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hm, well")
    assert message.content[0].text == "yes"
    events = stream(make_engine(script=script), codec)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, well"
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0


class Place(pydantic.BaseModel):
    city: str


def test_structured_output_is_parsed_by_the_client() -> None:
    engine = make_engine(script=CODEC.encode('{"city": "Paris"}'))
    response = talk(engine, lambda client: client.responses.parse(**BODY, text_format=Place))
    assert response.output_parsed == Place(city="Paris")
    assert engine.submitted[0].sampling.grammar.kind == "json_schema"


def test_log_probabilities_are_included_where_asked_for() -> None:
    response = whole(make_engine(), include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": "go " * 900}, "input"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str, is_stream: bool) -> None:
    engine = make_engine()
    response = post(engine, "/v1/responses", {**BODY, **fields, "stream": is_stream})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith(param)
    assert not engine.submitted


def test_nothing_is_stored_and_the_refusal_says_so() -> None:
    response = post(make_engine(), "/v1/responses", {**BODY, "previous_response_id": "resp_1"})
    assert "stores no responses" in error_of(response)["message"]
    assert post(make_engine(), "/v1/responses", {**BODY, "store": True}).json()["store"] is False


def test_errors_before_the_first_token_are_a_status_and_later_ones_an_event() -> None:
    with pytest.raises(openai.RateLimitError):
        stream(make_engine(refusal=QueueFull("full", retry_after_s=1)))
    events = stream(make_engine(fail_after=8, failure=EngineError("the step failed")))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the step failed"


def test_a_client_that_leaves_frees_its_request() -> None:
    engine = make_engine(step_s=0.001, script=CODEC.encode("go " * 60), max_step=1)

    async def work(client: openai.AsyncOpenAI) -> None:
        events = await client.responses.create(**BODY, stream=True)
        async for _ in events:
            break
        await events.close()

    talk(engine, work)
    assert not engine.running


def test_events_are_framed_with_their_type() -> None:
    response = post(make_engine(), "/v1/responses", {**BODY, "stream": True})
    for block in response.text.split("\n\n")[:-1]:
        event, data = block.split("\n")
        assert event.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
