"""The OpenAI-compatible HTTP application: its routes, its middleware and its exception handlers.

Everything it needs comes in `ApiDependencies`, at construction or later, so it runs the same inside a Serve replica,
under uvicorn and in a test. Does not know Ray or how a response is generated (`generate`).

    CORS -> request id (`connection`) -> access control (`access`) -> route
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deployments.engine_client import Health, ServedAdapter
from deployments.errors import from_validation, routing_error, to_http
from deployments.http.access import Access, Guard
from deployments.http.admission import Admission
from deployments.http.connection import ClientGone, RequestContext, read_body
from deployments.http.dependencies import ApiDependencies
from deployments.http.generate import find_adapter, generate, json_response, parse_body
from deployments.http.openapi import openapi_document
from deployments.http.responses_route import (
    client_name,
    delete_response,
    list_input_items,
    read_response,
    respond,
)
from deployments.openai.prompts import ApiLimits, detokenize, has_messages, tokenize
from deployments.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.openai.responses import HealthReport, ModelCard, ModelList, VersionReport
from engine.errors import EngineError, EngineUnavailable, InvalidRequest, PacelineError

__all__ = ["ApiDependencies", "ApiLimits", "attach", "build_api"]

MAX_LISTED = 100
"""Most input items in one answer."""
CLIENT_GONE_STATUS = 499
"""Status of a response whose client has left. It appears in logs only."""


def build_api(dependencies: ApiDependencies | None = None, access: Access | None = None) -> FastAPI:
    """The application. Without dependencies it responds with 503 until `attach` provides them.

    Args:
        access: who may send requests; None allows everybody.
    """
    app = FastAPI(title="Paceline", openapi_url=None, redirect_slashes=False)
    if access is not None:
        app.add_middleware(Guard, access=access)
    app.add_middleware(RequestContext)
    if access is not None and access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST", "DELETE"],
            # OpenAI's browser client sends headers of its own, and their names change between versions.
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/ping", _ping, methods=["GET"])
    app.add_api_route("/version", _version, methods=["GET"])
    app.add_api_route("/v1/models", _list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", _get_model, methods=["GET"])
    app.add_api_route("/v1/responses/{response_id}", _read_response, methods=["GET"])
    app.add_api_route("/v1/responses/{response_id}", _delete_response, methods=["DELETE"])
    app.add_api_route("/v1/responses/{response_id}/input_items", _list_input_items, methods=["GET"])
    # These routes read the raw body themselves, so FastAPI does not parse it.
    for path, route in POST_ROUTES.items():
        app.add_route(path, route, methods=["POST"])
    app.add_api_route("/openapi.json", _openapi, methods=["GET"])
    app.state.dependencies = dependencies
    return app


def attach(app: FastAPI, dependencies: ApiDependencies) -> None:
    """Provide or replace the dependencies of an application."""
    app.state.dependencies = dependencies


def _dependencies(request: Request) -> ApiDependencies:
    dependencies: ApiDependencies | None = request.app.state.dependencies
    if dependencies is None:
        raise EngineUnavailable("The server is starting; try again soon")
    return dependencies


async def _health(request: Request) -> Response:
    try:
        dependencies = _dependencies(request)
        health = drained(await dependencies.engine.health(), dependencies.admission)
    except EngineError as error:
        health = Health(status="dead", reason=str(error), draft="unknown")
    report = HealthReport(health.status, health.reason, health.draft)
    return json_response(msgspec.json.encode(report), 200 if health.is_serving else 503)


def drained(health: Health, admission: Admission) -> Health:
    """The health of a server, with status `draining` or `drained` while it accepts no requests."""
    if admission.accepts or not health.is_serving:
        return health
    count = admission.num_in_flight
    return replace(health, status="draining" if count else "drained", reason=f"{count} requests in flight")


async def _list_models(request: Request) -> Response:
    dependencies = _dependencies(request)
    cards = [adapter_card(served, dependencies) for served in dependencies.adapters.values()]
    return json_response(msgspec.json.encode(ModelList((_model_card(dependencies), *cards))))


async def _get_model(request: Request, model_id: str) -> Response:
    dependencies = _dependencies(request)
    served = find_adapter(model_id, dependencies)
    card = _model_card(dependencies) if served is None else adapter_card(served, dependencies)
    return json_response(msgspec.json.encode(card))


async def _chat_completions(request: Request) -> Response:
    return await generate(request, ChatBody, _dependencies(request))


async def _completions(request: Request) -> Response:
    return await generate(request, CompletionBody, _dependencies(request))


async def _responses(request: Request) -> Response:
    return await respond(request, _dependencies(request))


async def _read_response(request: Request, response_id: str, stream: bool = False) -> Response:
    if stream:
        raise InvalidRequest("stream is not supported for stored responses; leave it out", field="stream")
    return read_response(client_name(request), response_id, _dependencies(request).responses)


async def _delete_response(request: Request, response_id: str) -> Response:
    return delete_response(client_name(request), response_id, _dependencies(request).responses)


async def _list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    store = _dependencies(request).responses
    return list_input_items(client_name(request), response_id, store, limit=limit, order=order, after=after)


async def _ping(request: Request) -> Response:
    """Health as an empty response, for load balancers that ask so."""
    return Response(status_code=(await _health(request)).status_code)


async def _version(request: Request) -> Response:
    del request
    return json_response(msgspec.json.encode(VersionReport(version("paceline"))))


async def _tokenize(request: Request) -> Response:
    dependencies = _dependencies(request)
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    return json_response(await asyncio.to_thread(_tokenize_raw, raw, dependencies))


def _tokenize_raw(raw: bytes, dependencies: ApiDependencies) -> bytes:
    body_type: type[TokenizeBody | TokenizeChatBody] = TokenizeChatBody if has_messages(raw) else TokenizeBody
    body = parse_body(raw, body_type, dependencies)
    return msgspec.json.encode(tokenize(body, dependencies.codec, dependencies.limits))


async def _detokenize(request: Request) -> Response:
    dependencies = _dependencies(request)
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    return json_response(await asyncio.to_thread(_detokenize_raw, raw, dependencies))


def _detokenize_raw(raw: bytes, dependencies: ApiDependencies) -> bytes:
    body = parse_body(raw, DetokenizeBody, dependencies)
    return msgspec.json.encode(detokenize(body, dependencies.codec, dependencies.limits))


async def _openapi(request: Request) -> Response:
    dependencies: ApiDependencies | None = request.app.state.dependencies
    names = () if dependencies is None else (dependencies.model_name, *dependencies.adapters)
    return json_response(await asyncio.to_thread(openapi_document, names))


POST_ROUTES = {
    "/v1/chat/completions": _chat_completions,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


def adapter_card(served: ServedAdapter, dependencies: ApiDependencies) -> ModelCard:
    """An adapter in the list of models."""
    return ModelCard(
        id=served.ref.name,
        created=served.created,
        root=served.ref.name,
        parent=dependencies.model_name,
        max_model_len=dependencies.limits.max_model_len,
    )


def _model_card(dependencies: ApiDependencies) -> ModelCard:
    return ModelCard(
        id=dependencies.model_name,
        created=dependencies.created,
        root=dependencies.model_name,
        max_model_len=dependencies.limits.max_model_len,
    )


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    del request
    return to_http(error).response()


async def _on_routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return routing_error(error.status_code, request.method, request.scope["path"], error.headers).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """A response to errors of parameters that FastAPI checks itself."""
    del request
    if not isinstance(error, RequestValidationError):
        raise error
    details = error.errors()
    # FastAPI puts the place of a value ("query", "path") before its name.
    return to_http(from_validation([{**details[0], "loc": details[0]["loc"][1:]}])).response()


async def _on_client_gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_GONE_STATUS)
