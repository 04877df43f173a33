"""The OpenAI-compatible HTTP application: routes, and the way of a request through them.

Owns which route does what and the order of checks. Everything it needs comes in `ApiDependencies`, at
construction or later, so it runs the same inside a Serve replica, under uvicorn and in a test. Does not know Ray or
how tokens are made.

    body -> protocol -> generation.make_submit -> EngineClient -> generation.read_pieces -> responses -> (sse ->) client
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deployments.connection import ClientGone, RequestContext, read_body, while_connected
from deployments.detokenizer import TextStream
from deployments.engine_client import EngineClient, Health
from deployments.generation import ApiLimits, RunningId, RunningIds, make_submit, read_pieces
from deployments.http_errors import ModelNotFound, from_validation, routing_error, to_http
from deployments.protocol import ChatBody, CompletionBody
from deployments.responses import (
    AnswerWriter,
    ChatFormat,
    CompletionFormat,
    HealthReport,
    ModelCard,
    ModelList,
    Piece,
)
from deployments.sse import EventStreamResponse, event_bytes
from deployments.text import TextCodec
from engine.errors import EngineError, EngineUnavailable, PacelineError
from engine.request import Submit

__all__ = ["ApiDependencies", "ApiLimits", "attach", "build_api"]

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


def build_api(dependencies: ApiDependencies | None = None) -> FastAPI:
    """The application; without dependencies it answers 503 until `attach` brings them."""
    app = FastAPI(title="Paceline", openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestContext)
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
        health = await _dependencies(request).client_provider().health()
    except EngineError as error:
        health = Health(status="dead", reason=str(error), draft="unknown")
    report = HealthReport(health.status, health.reason, health.draft)
    return _json(msgspec.json.encode(report), 200 if health.is_serving else 503)


async def _list_models(request: Request) -> Response:
    return _json(msgspec.json.encode(ModelList((_model_card(_dependencies(request)),))))


async def _get_model(request: Request, model_id: str) -> Response:
    dependencies = _dependencies(request)
    _check_model(model_id, dependencies)
    return _json(msgspec.json.encode(_model_card(dependencies)))


async def _chat_completions(request: Request) -> Response:
    return await _generate(request, ChatBody, ChatFormat())


async def _completions(request: Request) -> Response:
    return await _generate(request, CompletionBody, CompletionFormat())


async def _generate(
    request: Request, body_type: type[ChatBody | CompletionBody], answer_format: ChatFormat | CompletionFormat
) -> Response:
    dependencies = _dependencies(request)
    limits = dependencies.limits
    raw = await read_body(request, max_bytes=limits.max_body_bytes)
    running = dependencies.running.claim(request.state.request_id)
    try:
        if len(raw) > limits.inline_body_bytes:
            body, submit = await asyncio.to_thread(_prepare, raw, body_type, running.request_id, dependencies)
        else:
            body, submit = _prepare(raw, body_type, running.request_id, dependencies)
        text = TextStream(dependencies.codec.detokenizer(), body.stop)
        pieces = _run(dependencies.client_provider(), submit, text, running)
        writer = AnswerWriter(
            answer_format,
            request_id=running.request_id,
            created=int(time.time()),
            model=dependencies.model_name,
            system_fingerprint=dependencies.system_fingerprint,
            num_prompt=len(submit.prompt),
        )
        if not body.stream:
            return _json(await while_connected(request.receive, _collect(pieces, writer)))
        # The first step decides the status line: what goes wrong before it is an ordinary error response.
        first = await while_connected(request.receive, _take(pieces))
    except BaseException:
        running.release()
        raise
    return EventStreamResponse(event_bytes(first, pieces, writer, includes_usage=body.includes_usage))


def _prepare(
    raw: bytes, body_type: type[ChatBody | CompletionBody], request_id: str, dependencies: ApiDependencies
) -> tuple[ChatBody | CompletionBody, Submit]:
    """Parse, check and tokenise. Runs in a thread for long bodies.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    _check_model(body.model, dependencies)
    return body, make_submit(body, request_id, dependencies.codec, dependencies.limits)


async def _run(
    client: EngineClient, submit: Submit, text: TextStream, running: RunningId
) -> AsyncGenerator[Piece, None]:
    """The pieces of one request; its id is free again when they end."""
    pieces = read_pieces(client.generate(submit), text)
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()
        running.release()


async def _take(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


async def _collect(pieces: AsyncGenerator[Piece, None], writer: AnswerWriter) -> bytes:
    texts = []
    try:
        async for piece in pieces:
            texts.append(piece.text)
            if piece.finish_reason is not None:
                return writer.whole("".join(texts), piece, piece.finish_reason)
    finally:
        await pieces.aclose()
    raise EngineError("The engine ended this request without a finish reason")


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
