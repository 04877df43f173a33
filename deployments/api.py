"""The OpenAI-compatible HTTP application: routes, and the way of a request through them.

Owns which route does what and the order of checks. Everything it needs comes in `ApiDependencies`, at
construction or later, so it runs the same inside a Serve replica, under uvicorn and in a test. Does not know Ray or
how tokens are made.

    body -> protocol -> generation.make_submits -> EngineClient -> generation.read_pieces -> (fanout ->) answers
         -> (sse ->) client
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deployments.access import Access, Guard
from deployments.admission import ANONYMOUS, Admission, Client
from deployments.answers import AnswerWriter, ChatFormat, CompletionFormat, join
from deployments.connection import ClientGone, RequestContext, read_body, while_connected
from deployments.deadline import until
from deployments.engine_client import EngineClient, Health
from deployments.fanout import merge
from deployments.generation import (
    RunningId,
    RunningIds,
    choose_priority,
    make_choice,
    make_submits,
    read_pieces,
)
from deployments.http_errors import ModelNotFound, from_validation, routing_error, to_http
from deployments.openapi import openapi_document
from deployments.prompts import ApiLimits
from deployments.protocol import ChatBody, CompletionBody, DetokenizeBody, ModelBody, TokenizeBody, TokenizeChatBody
from deployments.responses import HealthReport, ModelCard, ModelList, Piece
from deployments.sse import EventStreamResponse, event_bytes
from deployments.text import TextCodec
from deployments.tokenization import detokenize, has_messages, tokenize
from engine.errors import EngineError, EngineUnavailable, PacelineError
from engine.request import Submit

__all__ = ["ApiDependencies", "ApiLimits", "attach", "build_api"]

B = TypeVar("B", bound=ModelBody)

MAX_UNBOUNDED = 1 << 30
"""Answers in flight where nobody says how many may be."""
CLIENT_GONE_STATUS = 499
"""For logs only: nobody reads it."""


@dataclass(frozen=True, kw_only=True)
class ApiDependencies:
    """All that the routes need from outside."""

    client_provider: Callable[[], EngineClient]
    """The engine now; may raise EngineUnavailable."""
    codec: TextCodec
    model_name: str
    created: int
    """When the model was made available, unix seconds."""
    limits: ApiLimits
    system_fingerprint: str | None = None
    running: RunningIds = field(default_factory=RunningIds)
    admission: Admission = field(default_factory=lambda: Admission(MAX_UNBOUNDED))
    timeout_s: float = 3600.0
    """Longest time that an answer may take; requests may ask for less."""


def build_api(dependencies: ApiDependencies | None = None, access: Access | None = None) -> FastAPI:
    """The application; without dependencies it answers 503 until `attach` brings them.

    Args:
        access: who may come in; without it, whoever reaches it.
    """
    app = FastAPI(title="Paceline", openapi_url=None, redirect_slashes=False)
    if access is not None:
        app.add_middleware(Guard, access=access)
    app.add_middleware(RequestContext)
    if access is not None and access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/v1/models", _list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", _get_model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", _chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", _completions, methods=["POST"])
    app.add_api_route("/tokenize", _tokenize, methods=["POST"])
    app.add_api_route("/detokenize", _detokenize, methods=["POST"])
    app.add_api_route("/openapi.json", _openapi, methods=["GET"])
    app.state.dependencies = dependencies
    return app


def attach(app: FastAPI, dependencies: ApiDependencies) -> None:
    """Give an application what it needs, after it was built."""
    app.state.dependencies = dependencies


def _dependencies(request: Request) -> ApiDependencies:
    dependencies: ApiDependencies | None = request.app.state.dependencies
    if dependencies is None:
        raise EngineUnavailable("The server is starting; try again soon")
    return dependencies


async def _health(request: Request) -> Response:
    try:
        dependencies = _dependencies(request)
        health = drained(await dependencies.client_provider().health(), dependencies.admission)
    except EngineError as error:
        health = Health(status="dead", reason=str(error), draft="unknown")
    report = HealthReport(health.status, health.reason, health.draft)
    return _json(msgspec.json.encode(report), 200 if health.is_serving else 503)


def drained(health: Health, admission: Admission) -> Health:
    """The health of a server that may be draining."""
    if admission.accepts or not health.is_serving:
        return health
    count = admission.num_in_flight
    return replace(health, status="draining" if count else "drained", reason=f"{count} answers in flight")


async def _list_models(request: Request) -> Response:
    return _json(msgspec.json.encode(ModelList((_model_card(_dependencies(request)),))))


async def _get_model(request: Request, model_id: str) -> Response:
    dependencies = _dependencies(request)
    _check_model(model_id, dependencies)
    return _json(msgspec.json.encode(_model_card(dependencies)))


async def _chat_completions(request: Request) -> Response:
    return await _generate(request, ChatBody)


async def _completions(request: Request) -> Response:
    return await _generate(request, CompletionBody)


async def _tokenize(request: Request) -> Response:
    dependencies = _dependencies(request)
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    return _json(await asyncio.to_thread(_tokenize_raw, raw, dependencies))


def _tokenize_raw(raw: bytes, dependencies: ApiDependencies) -> bytes:
    body_type: type[TokenizeBody | TokenizeChatBody] = TokenizeChatBody if has_messages(raw) else TokenizeBody
    body = _parse(raw, body_type, dependencies)
    return msgspec.json.encode(tokenize(body, dependencies.codec, dependencies.limits))


async def _detokenize(request: Request) -> Response:
    dependencies = _dependencies(request)
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    return _json(await asyncio.to_thread(_detokenize_raw, raw, dependencies))


def _detokenize_raw(raw: bytes, dependencies: ApiDependencies) -> bytes:
    body = _parse(raw, DetokenizeBody, dependencies)
    return msgspec.json.encode(detokenize(body, dependencies.codec, dependencies.limits))


async def _openapi(request: Request) -> Response:
    dependencies: ApiDependencies | None = request.app.state.dependencies
    return _json(await asyncio.to_thread(openapi_document, dependencies and dependencies.model_name))


async def _generate(request: Request, body_type: type[ChatBody | CompletionBody]) -> Response:
    dependencies = _dependencies(request)
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    client: Client = getattr(request.state, "client", ANONYMOUS)
    held = ExitStack()  # what this request holds until its answer has ended; closing it again changes nothing
    try:
        claims = [_claim(request.state.request_id, dependencies, held)]
        body, submits = await _prepare(raw, body_type, claims[0].request_id, dependencies)
        priority = choose_priority(body, client)
        held.callback(dependencies.admission.enter(client, len(submits)).release)
        claims += [_claim(submit.request_id, dependencies, held) for submit in submits[1:]]
        named = tuple(
            replace(submit, request_id=claim.request_id, client=client.name, priority=priority)
            for submit, claim in zip(submits, claims, strict=True)
        )
        pieces = _run(body, named, held, dependencies)
        writer = _writer(body, submits, dependencies)
        if not body.stream:
            return _json(await while_connected(request.receive, _collect(pieces, writer)))
        # The first step decides the status line: what goes wrong before it is an ordinary error response.
        first = await while_connected(request.receive, _take(pieces))
    except BaseException:
        held.close()
        raise
    events = event_bytes(first, pieces, writer, includes_usage=body.includes_usage, includes_silent=body.streams_tokens)
    return EventStreamResponse(events)


async def _prepare(
    raw: bytes, body_type: type[ChatBody | CompletionBody], request_id: str, dependencies: ApiDependencies
) -> tuple[ChatBody | CompletionBody, tuple[Submit, ...]]:
    """Parse, check and tokenise; in a thread where it may take long, because of its length or a grammar.

    Raises:
        InvalidRequest: naming the field.
    """
    is_long = len(raw) > dependencies.limits.inline_body_bytes
    if is_long:
        body = await asyncio.to_thread(_parse, raw, body_type, dependencies)
    else:
        body = _parse(raw, body_type, dependencies)
    make = partial(make_submits, body, request_id, dependencies.codec, dependencies.limits)
    return body, await asyncio.to_thread(make) if is_long or body.needs_grammar else make()


def _parse(raw: bytes, body_type: type[B], dependencies: ApiDependencies) -> B:
    """Raises InvalidRequest, naming the field."""
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    _check_model(body.model, dependencies)
    return body


def _writer(body: ChatBody | CompletionBody, submits: Sequence[Submit], dependencies: ApiDependencies) -> AnswerWriter:
    format_type = ChatFormat if isinstance(body, ChatBody) else CompletionFormat
    return AnswerWriter(
        format_type(dependencies.codec.name_of, body.num_logprobs or 0),
        request_id=submits[0].request_id,
        created=int(time.time()),
        model=dependencies.model_name,
        system_fingerprint=dependencies.system_fingerprint,
        num_prompt=sum(len(submit.prompt) for submit in submits[:: body.num_choices]),
        num_choices=len(submits),
        choices_per_prompt=body.num_choices,
    )


def _claim(request_id: str, dependencies: ApiDependencies, held: ExitStack) -> RunningId:
    claim = dependencies.running.claim(request_id)
    held.callback(claim.release)
    return claim


async def _run(
    body: ChatBody | CompletionBody, submits: Sequence[Submit], held: ExitStack, dependencies: ApiDependencies
) -> AsyncGenerator[Piece, None]:
    """The pieces of all answers; what the request holds is free again when they end."""
    client = dependencies.client_provider()
    sources = []
    for index, submit in enumerate(submits):
        choice = make_choice(body, submit, index, dependencies.codec)
        sources.append(read_pieces(client.generate(submit), choice))
    pieces = until(
        sources[0] if len(sources) == 1 else merge(sources),
        timeout_s=min(body.timeout or math.inf, dependencies.timeout_s),
    )
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()
        held.close()


async def _take(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


async def _collect(pieces: AsyncGenerator[Piece, None], writer: AnswerWriter) -> bytes:
    choices: list[list[Piece]] = [[] for _ in range(writer.num_choices)]
    try:
        async for piece in pieces:
            choices[piece.index].append(piece)
    finally:
        await pieces.aclose()
    return writer.whole([join(choice) for choice in choices])


def _check_model(name: str, dependencies: ApiDependencies) -> None:
    if name != dependencies.model_name:
        raise ModelNotFound(
            f"The model {name[:200]!r} does not exist; this server has {dependencies.model_name!r}", field="model"
        )


def _model_card(dependencies: ApiDependencies) -> ModelCard:
    return ModelCard(
        id=dependencies.model_name,
        created=dependencies.created,
        max_model_len=dependencies.limits.max_model_len,
    )


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    del request
    return to_http(error).response()


async def _on_routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return routing_error(error.status_code, request.method, request.url.path, error.headers).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """For routes with parameters that FastAPI checks itself."""
    del request
    if not isinstance(error, RequestValidationError):
        raise error
    details = error.errors()
    # FastAPI puts where a value stood ("query", "path") before its name.
    return to_http(from_validation([{**details[0], "loc": details[0]["loc"][1:]}])).response()


async def _on_client_gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_GONE_STATUS)
