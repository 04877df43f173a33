"""The two generation routes: from the body of a request to its response, and what the request holds meanwhile.

Owns the order of the checks, and the release of request ids and places in the queue however a request ends. Does not
know the routes, the fields of a body, or how tokens are computed.

    body -> make_submits -> admission -> EngineClient -> read_text_deltas -> (merge_streams ->)
         -> until -> ResponseWriter -> (sse ->) client
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from deployments.engine_client import ServedAdapter
from deployments.errors import ModelNotFound, from_validation
from deployments.http.admission import ANONYMOUS, Client, choose_priority
from deployments.http.connection import read_body, while_connected
from deployments.http.dependencies import ApiDependencies, RunningId
from deployments.http.response_streams import merge_streams, until
from deployments.http.sse import EventStreamResponse, event_bytes
from deployments.openai.choice_stream import make_choice, read_text_deltas
from deployments.openai.engine_requests import make_submits
from deployments.openai.generation_body import ModelBody
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.response_writer import ChatFormat, CompletionFormat, ResponseWriter, join_deltas
from deployments.openai.responses import TextDelta
from engine.errors import InvalidRequest
from engine.messages import Submit

B = TypeVar("B", bound=ModelBody)


async def generate(
    request: Request, body_type: type[ChatBody | CompletionBody], dependencies: ApiDependencies
) -> Response:
    """Respond to a POST of either generation route, in one JSON document or as an event stream.

    Raises:
        PacelineError: an error before the first token. Later errors are events of the stream.
        ClientGone: the client closed the connection.
    """
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    held = ExitStack()  # ids and places of this request; closing it twice has no effect
    try:
        started = await start(request, raw, lambda raw: parse_body(raw, body_type, dependencies), held, dependencies)
        body, deltas = started.body, started.text_deltas
        writer = _writer(body, started.submits, dependencies)
        try:
            if not body.stream:
                return json_response(await while_connected(request.receive, _collect(deltas, writer)))
            # The first step decides the status line: an error before it is an ordinary error response.
            first = await while_connected(request.receive, _take(deltas))
        except InvalidRequest as error:
            raise with_client_field(error, body) from error
    except BaseException:
        held.close()
        raise
    events = event_bytes(first, deltas, writer, includes_usage=body.includes_usage, includes_silent=body.streams_tokens)
    return EventStreamResponse(events)


@dataclass(frozen=True, slots=True)
class Started:
    """A request that the engine has been given."""

    body: ChatBody | CompletionBody
    submits: tuple[Submit, ...]
    text_deltas: AsyncGenerator[TextDelta, None]
    """Text deltas of all choices."""


async def start(
    request: Request,
    raw: bytes,
    parse: Callable[[bytes], ChatBody | CompletionBody],
    held: ExitStack,
    dependencies: ApiDependencies,
) -> Started:
    """Check a request, admit it and hand it to the engine.

    Args:
        raw: the body.
        parse: makes the body to generate for of it; raises InvalidRequest.
        held: gets what the request holds; closed when the text deltas end.

    Raises:
        InvalidRequest: naming the field.
        QueueFull: it was not admitted.
    """
    client: Client = getattr(request.state, "client", ANONYMOUS)
    claims = [_claim(request.state.request_id, dependencies, held)]
    try:
        body, submits = await _prepare(raw, parse, claims[0].request_id, dependencies)
        priority = choose_priority(body, client)
        served = find_adapter(body.model, dependencies)  # again: it may have been unloaded since
    except InvalidRequest:
        dependencies.admission.count_invalid()
        raise
    held.callback(dependencies.admission.enter(client, len(submits)).release)
    claims += [_claim(submit.request_id, dependencies, held) for submit in submits[1:]]
    named = tuple(
        replace(
            submit,
            request_id=claim.request_id,
            client=client.name,
            priority=priority,
            adapter=None if served is None else served.ref,
        )
        for submit, claim in zip(submits, claims, strict=True)
    )
    return Started(body, submits, _run(body, named, held, dependencies))


async def _prepare(
    raw: bytes,
    parse: Callable[[bytes], ChatBody | CompletionBody],
    request_id: str,
    dependencies: ApiDependencies,
) -> tuple[ChatBody | CompletionBody, tuple[Submit, ...]]:
    """Parse, check and tokenise a body; in a thread if it is long or has a grammar, because both take time.

    Raises:
        InvalidRequest: a field has a bad value.
    """
    is_long = len(raw) > dependencies.limits.inline_body_bytes
    if is_long:
        body = await asyncio.to_thread(parse, raw)
    else:
        body = parse(raw)
    make = partial(make_submits, body, request_id, dependencies.codec, dependencies.limits, dependencies.check_grammar)
    return body, await asyncio.to_thread(make) if is_long or body.needs_grammar else make()


def parse_body(raw: bytes, body_type: type[B], dependencies: ApiDependencies) -> B:
    """The body as its model. Raises InvalidRequest with the name of the bad field."""
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    find_adapter(body.model, dependencies)
    return body


def with_client_field(error: InvalidRequest, body: ChatBody | CompletionBody) -> InvalidRequest:
    """An error of the engine that names the field of the body instead of the engine's own parameter."""
    if error.field != "grammar":
        return error
    field = next((field for field, _ in body.grammars()), "tool_choice")
    return InvalidRequest(f"{field}: {error}", field=field)


def _writer(
    body: ChatBody | CompletionBody, submits: Sequence[Submit], dependencies: ApiDependencies
) -> ResponseWriter:
    format_type = ChatFormat if isinstance(body, ChatBody) else CompletionFormat
    return ResponseWriter(
        format_type(dependencies.codec.name_of, body.num_logprobs or 0),
        request_id=submits[0].request_id,
        created=int(time.time()),
        model=body.model,
        system_fingerprint=dependencies.system_fingerprint,
        num_prompt=sum(len(submit.prompt) for submit in submits[:: body.num_choices]),
        num_choices=len(submits),
        choices_per_prompt=body.num_choices,
        has_continuous_usage=body.has_continuous_usage,
    )


def _claim(request_id: str, dependencies: ApiDependencies, held: ExitStack) -> RunningId:
    claim = dependencies.running.claim(request_id)
    held.callback(claim.release)
    return claim


def _run(
    body: ChatBody | CompletionBody, submits: Sequence[Submit], held: ExitStack, dependencies: ApiDependencies
) -> AsyncGenerator[TextDelta, None]:
    """The text deltas of all choices. Releases what the request holds when they end."""
    sources = []
    for index, submit in enumerate(submits):
        choice = make_choice(body, submit, index, dependencies.codec)
        sources.append(read_text_deltas(dependencies.engine.generate(submit), choice))
    return until(
        sources[0] if len(sources) == 1 else merge_streams(sources),
        timeout_s=min(body.timeout or math.inf, dependencies.timeout_s),
        at_end=held.close,
    )


async def _take(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(deltas)


async def _collect(deltas: AsyncGenerator[TextDelta, None], writer: ResponseWriter) -> bytes:
    choices: list[list[TextDelta]] = [[] for _ in range(writer.num_choices)]
    try:
        async for delta in deltas:
            choices[delta.index].append(delta)
    finally:
        await deltas.aclose()
    return writer.response([join_deltas(choice) for choice in choices])


def find_adapter(name: str, dependencies: ApiDependencies) -> ServedAdapter | None:
    """The adapter of this name; None for the base model.

    Raises:
        ModelNotFound: this server has no such model.
    """
    if name == dependencies.model_name:
        return None
    served = dependencies.adapters.get(name)
    if served is None:
        names = ", ".join(map(repr, (dependencies.model_name, *dependencies.adapters)))
        raise ModelNotFound(f"The model {name[:200]!r} does not exist; this server has {names}", field="model")
    return served


def json_response(content: bytes, status: int = 200) -> Response:
    """A response whose body is JSON already."""
    return Response(content, status, media_type="application/json")
