"""Errors of a request: from the engine's delta to an exception, and from an exception to an HTTP response.

Owns both tables, the errors that only HTTP has, and the name of a bad field. Does not know routes.
An exception that is not in the table becomes HTTP 500 with a fixed message, so no internal detail reaches a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from engine.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    PacelineError,
    QueueFull,
    RequestError,
    ShardDown,
)
from engine.messages import Delta

UNAVAILABLE_RETRY_S = 5
"""Value of Retry-After in seconds while the engine starts or is replaced."""


ABSENT_ROUTES = {
    "/v1/embeddings": "This server has no embeddings: it serves a model that generates text",
    "/v1/moderations": "This server has no moderations: it serves a model that generates text",
}
"""Routes of OpenAI's that clients often ask for, and why they are not here."""


class ModelNotFound(InvalidRequest):
    """The server does not serve a model of this name."""


class ResponseNotFound(InvalidRequest):
    """No stored response of this client has this id."""


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request continues is not stored."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the requested tokens do not fit into the context."""


class BodyTooLarge(RequestError):
    """The body is larger than `max_body_bytes`."""


class BodyTooSlow(RequestError):
    """The client took too long to send the body."""


class UnsupportedMediaType(RequestError):
    """The content type is not JSON."""


class RateLimited(QueueFull):
    """The client reached a limit of its API key."""


class DeadlineExceeded(RequestError):
    """The response was not complete within the timeout of the request or of the server."""


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str | None


_TABLE: dict[type[Exception], _Row] = {
    ModelNotFound: _Row(404, "invalid_request_error", "model_not_found"),
    ResponseNotFound: _Row(404, "invalid_request_error", "response_not_found"),
    PreviousResponseNotFound: _Row(400, "invalid_request_error", "previous_response_not_found"),
    ContextLengthExceeded: _Row(400, "invalid_request_error", "context_length_exceeded"),
    InvalidRequest: _Row(400, "invalid_request_error", None),
    BodyTooLarge: _Row(413, "invalid_request_error", "request_too_large"),
    BodyTooSlow: _Row(408, "invalid_request_error", "request_too_slow"),
    UnsupportedMediaType: _Row(415, "invalid_request_error", "unsupported_media_type"),
    QueueFull: _Row(429, "rate_limit_error", "queue_full"),
    RateLimited: _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    DeadlineExceeded: _Row(408, "timeout_error", "deadline_exceeded"),
    RequestError: _Row(400, "invalid_request_error", None),
    EngineUnavailable: _Row(503, "service_unavailable_error", "engine_unavailable"),
    ShardDown: _Row(503, "service_unavailable_error", "engine_unavailable"),
    EngineError: _Row(500, "server_error", "engine_error"),
}
_UNEXPECTED = _Row(500, "server_error", "internal_error")


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class HttpError:
    """One error, ready to be sent as a response or inside a stream."""

    status: int
    body: bytes
    """The error as JSON."""
    headers: Mapping[str, str]

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


def to_http(error: Exception) -> HttpError:
    """Status, headers and body for an exception, by its nearest base class in the table."""
    row = next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), _UNEXPECTED)
    message = str(error) if isinstance(error, PacelineError) and row is not _UNEXPECTED else "Internal server error"
    field = error.field if isinstance(error, InvalidRequest) else None
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif row.status == 503:
        headers["retry-after"] = str(UNAVAILABLE_RETRY_S)
    return HttpError(row.status, encode_error(message, row.type, field, row.code), headers)


def routing_error(status: int, method: str, path: str, headers: Mapping[str, str] | None) -> HttpError:
    """The response to a request whose path (404) or method (405) matches no route."""
    if status == 404:
        absent = next((reason for route, reason in ABSENT_ROUTES.items() if path.endswith(route)), None)
        message, code = absent or f"Unknown route: {method} {path}", "unknown_route"
    elif status == 405:
        message, code = f"Method {method} is not allowed on {path}", "method_not_allowed"
    else:
        message, code = f"The request failed with status {status}", None
    return HttpError(status, encode_error(message, "invalid_request_error", None, code), dict(headers or {}))


def failure_of(delta: Delta) -> PacelineError:
    """The exception for a delta whose finish_reason is `error`. The field keeps the engine's name for it."""
    if delta.error_kind == "invalid_request":
        return InvalidRequest(delta.error or "The engine refused this request", field=delta.error_field)
    return EngineError(delta.error or "The engine could not finish this request")


def encode_error(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """The JSON body of an error, in the OpenAI form."""
    return msgspec.json.encode(ErrorEnvelope(ErrorBody(message, error_type, param, code)))


def from_validation(details: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first validation error of a body, as an InvalidRequest with the name of the field."""
    first = details[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    context = first.get("ctx", {})
    named = context.get("field")  # Set by validators that compare several fields of the model at `loc`.
    field = _field_name((*first["loc"], named) if named else first["loc"])
    if field is None:
        return InvalidRequest("The body must be a JSON object")
    return InvalidRequest(_describe(first, field), field=field)


def _describe(first: Mapping[str, Any], field: str) -> str:
    if first["type"] == "missing":
        return f"Missing required field: {field}"
    if first["type"] in ("extra_forbidden", "unknown_field"):
        return f"Unknown field: {field}; this server refuses options that it does not know"
    if first["type"] == "invalid_value":
        return f"{field} {first['msg']}"
    return f"Invalid value for {field}: {first['msg']} (given: {_shorten(first['input'])})"


def _field_name(loc: tuple[int | str, ...]) -> str | None:
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None


def _shorten(value: Any, limit: int = 80) -> str:
    """At most `limit` characters of the client's value, so that a message never repeats a whole prompt."""
    if isinstance(value, str | list | dict) and len(value) > limit:
        return f"{type(value).__name__} of length {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # An integer of more digits than Python prints.
        return f"a {type(value).__name__} that is too long to print"
    return text if len(text) <= limit else text[:limit] + "..."
