"""The OpenAPI document of the HTTP interface, generated from the models of request bodies and responses.

Owns the body, responses and errors of each route. The routes read raw bodies, so FastAPI cannot derive them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.errors import ErrorEnvelope
from deployments.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    Detokenized,
    GenerationResponse,
    HealthReport,
    ModelCard,
    ModelList,
    Tokenized,
    VersionReport,
)
from deployments.responses_api.objects import DeletedResponse, Event, ItemList, ResponseObject
from deployments.responses_api.requests import ResponsesBody

_REF = "#/components/schemas/{%s}"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    TokenizeChatBody,
    DetokenizeBody,
    ResponsesBody,
)
_RESPONSES: tuple[Any, ...] = (
    GenerationResponse[ChatChoice],
    GenerationResponse[ChatChunkChoice],
    GenerationResponse[CompletionChoice],
    ModelList,
    ModelCard,
    HealthReport,
    Tokenized,
    Detokenized,
    VersionReport,
    ResponseObject,
    DeletedResponse,
    ItemList,
    Event,
    ErrorEnvelope,
)
_ERRORS = {
    400: "A field has a bad value, or the context is too short",
    401: "No valid API key",
    403: "A server without API keys accepts requests from loopback only; web pages of other origins need cors_origins",
    404: "No such model, response or route",
    408: "The body came too slowly, or the response was not complete within `timeout`",
    413: "The body is too large",
    415: "The content type is not JSON",
    429: "Too many requests are in flight; see Retry-After",
    500: "The engine failed",
    503: "The engine is starting, draining or dead; see Retry-After",
}


@lru_cache(maxsize=4)
def openapi_document(model_names: tuple[str, ...] = ()) -> bytes:
    """The document as JSON. The latest ones are cached.

    Args:
        model_names: the values that requests may send as `model`; empty if they are not known yet.
    """
    document = _document()
    if model_names:
        allowed = {"const": model_names[0]} if len(model_names) == 1 else {"enum": list(model_names)}
        for body in _BODIES:
            properties = document["components"]["schemas"][body.__name__]["properties"]
            properties["model"] = properties["model"] | allowed
    return msgspec.json.encode(document)


def _document() -> dict[str, Any]:
    _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF % "model")
    schemas, components = msgspec.json.schema_components(_RESPONSES, ref_template=_REF % "name")
    refs = {_name(response): schema for response, schema in zip(_RESPONSES, schemas, strict=True)}
    paths = {
        "/health": {"get": _operation("State of the engine", refs["HealthReport"], also={503: refs["HealthReport"]})},
        "/ping": {"get": _empty_operation("Whether requests are served")},
        "/version": {"get": _operation("The version of the server", refs["VersionReport"])},
        "/v1/models": {"get": _operation("The models served here", refs["ModelList"], errors=(503,))},
        "/v1/models/{model_id}": {
            "get": _operation("One model", refs["ModelCard"], errors=(404, 503))
            | {"parameters": [_path_parameter("model_id")]}
        },
        "/v1/chat/completions": {
            "post": _operation(
                "Generate the next message of a conversation",
                refs["ChatChoice"],
                body=_ref(ChatBody),
                chunk=refs["ChatChunkChoice"],
            )
        },
        "/v1/completions": {
            "post": _operation(
                "Continue prompts", refs["CompletionChoice"], body=_ref(CompletionBody), chunk=refs["CompletionChoice"]
            )
        },
        "/v1/responses": {
            "post": _operation(
                "Respond to input items", refs["ResponseObject"], body=_ref(ResponsesBody), chunk=refs["Event"]
            )
        },
        "/v1/responses/{response_id}": {
            "get": _operation("A stored response", refs["ResponseObject"], errors=(404, 503)),
            "delete": _operation("Delete a stored response", refs["DeletedResponse"], errors=(404, 503)),
            "parameters": [_path_parameter("response_id")],
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _operation("Input items of a stored response", refs["ItemList"], errors=(400, 404, 503))
            | {
                "parameters": [
                    _path_parameter("response_id"),
                    _query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
                    _query_parameter("order", {"enum": ["asc", "desc"]}),
                    _query_parameter("after", {"type": "string"}),
                ]
            }
        },
        "/tokenize": {
            "post": _operation(
                "Token ids of a text or a conversation",
                refs["Tokenized"],
                body={"anyOf": [_ref(TokenizeBody), _ref(TokenizeChatBody)]},
            )
        },
        "/detokenize": {"post": _operation("Text of token ids", refs["Detokenized"], body=_ref(DetokenizeBody))},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": version("paceline")},
        "paths": paths,
        "components": {"schemas": bodies["$defs"] | components},
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _name(response: Any) -> str:
    """The name of a type in `refs`: of a response with choices, the name of the type of its choices."""
    arguments = getattr(response, "__args__", ())
    return str(arguments[0].__name__ if arguments else response.__name__)


def _ref(body: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def _operation(
    summary: str,
    schema: Mapping[str, Any],
    *,
    body: Mapping[str, Any] | None = None,
    chunk: Mapping[str, Any] | None = None,
    errors: tuple[int, ...] | None = None,
    also: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """One operation.

    Args:
        schema: of the response.
        body: schema of the request body.
        chunk: schema of an event's data; None for a route that cannot stream.
        errors: possible error statuses; None for all if there is a body, else none.
        also: further statuses with their schemas.
    """
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(chunk)}
    responses: dict[str, Any] = {"200": {"description": "The response", "content": content}}
    for status in errors if errors is not None else tuple(_ERRORS) if body is not None else ():
        responses[str(status)] = _json_response(_ERRORS[status], {"$ref": "#/components/schemas/ErrorEnvelope"})
    for status, other in (also or {}).items():
        responses[str(status)] = _json_response(_ERRORS[status], other)
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _empty_operation(summary: str) -> dict[str, Any]:
    """An operation whose response has no body."""
    return {"summary": summary, "responses": {"200": {"description": "Yes"}, "503": {"description": "No"}}}


def _event(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of an event of a stream: a chunk, the error that ended the stream, or [DONE]."""
    data = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [chunk, {"$ref": "#/components/schemas/ErrorEnvelope"}]},
    }
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _json_response(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
