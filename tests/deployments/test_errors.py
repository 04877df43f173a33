"""The two tables of errors: from a delta to an exception, and from an exception to an HTTP response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    PreviousResponseNotFound,
    RateLimited,
    ResponseNotFound,
    UnsupportedMediaType,
    failure_of,
    from_validation,
    to_http,
)
from engine.errors import (
    ConfigError,
    DraftDown,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    PacelineError,
    QueueFull,
    RequestError,
    ShardDown,
)
from engine.messages import Delta, ErrorKind

STATUS = {
    InvalidRequest: 400,
    ContextLengthExceeded: 400,
    PreviousResponseNotFound: 400,
    RequestError: 400,
    ModelNotFound: 404,
    ResponseNotFound: 404,
    BodyTooSlow: 408,
    DeadlineExceeded: 408,
    BodyTooLarge: 413,
    UnsupportedMediaType: 415,
    QueueFull: 429,
    RateLimited: 429,
    ConfigError: 500,
    PacelineError: 500,
    EngineError: 500,
    DraftDown: 500,
    EngineUnavailable: 503,
    ShardDown: 503,
}


def family(root: type[PacelineError]) -> Iterator[type[PacelineError]]:
    yield root
    for child in root.__subclasses__():
        yield from family(child)


def test_every_error_has_a_status() -> None:
    assert {error for error in family(PacelineError) if error.__module__.startswith(("engine", "deployments"))} == set(
        STATUS
    )


@pytest.mark.parametrize(("error", "status"), STATUS.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_status_and_body_of_an_error(error: type[PacelineError], status: int) -> None:
    raised = error("why", retry_after_s=2.5) if issubclass(error, QueueFull) else error("why")  # type: ignore[call-arg]
    response = to_http(raised)
    body = json.loads(response.body)["error"]
    assert response.status == status
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["message"] == ("Internal server error" if error in (ConfigError, PacelineError) else "why")
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


def test_a_foreign_exception_reveals_nothing() -> None:
    response = to_http(KeyError("secret"))
    assert response.status == 500
    assert b"secret" not in response.body


def test_an_invalid_request_names_its_field() -> None:
    assert json.loads(to_http(InvalidRequest("bad", field="seed")).body)["error"]["param"] == "seed"


@pytest.mark.parametrize(
    ("kind", "field", "expected"),
    [("invalid_request", "grammar", InvalidRequest), ("internal", None, EngineError), (None, None, EngineError)],
)
def test_the_kind_of_a_delta_decides_the_exception(
    kind: ErrorKind | None, field: str | None, expected: type[PacelineError]
) -> None:
    delta = Delta(request_id="r", token_ids=(), finish_reason="error", error="why", error_kind=kind, error_field=field)
    error = failure_of(delta)
    assert type(error) is expected
    assert str(error) == "why"
    assert getattr(error, "field", None) == field


def test_an_error_delta_without_a_message_still_has_one() -> None:
    assert str(failure_of(Delta(request_id="r", token_ids=(), finish_reason="error")))


@pytest.mark.parametrize(
    ("detail", "field", "message"),
    [
        ({"type": "missing", "loc": ("model",), "msg": "", "input": {}}, "model", "Missing required field: model"),
        ({"type": "extra_forbidden", "loc": ("a", 1, "b"), "msg": "", "input": 1}, "a[1].b", "Unknown field: a[1].b"),
        ({"type": "x", "loc": ("n",), "msg": "too big", "input": 7}, "n", "Invalid value for n: too big (given: 7)"),
        ({"type": "x", "loc": ("n",), "msg": "bad", "input": "y" * 99}, "n", "(given: str of length 99)"),
        ({"type": "x", "loc": (), "msg": "", "input": 1}, None, "The body must be a JSON object"),
    ],
)
def test_a_validation_error_names_the_field(detail: dict[str, Any], field: str | None, message: str) -> None:
    error = from_validation([detail])
    assert error.field == field
    assert message in str(error)
