"""Routes for operators: read and change the pace, and show the timeline of a request.

Owns the check of the admin key and of the changes. Without an admin key in the environment the routes respond with 404.
Knows the engine only through the callables in `AdminDependencies`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import encode_error, from_validation
from deployments.http.connection import read_body
from deployments.monitoring.timelines import Timeline
from engine.config import PolicyName
from engine.core.pacing import SpeculationPlan
from engine.errors import InvalidRequest

ADMIN_KEY_ENV = "PACELINE_ADMIN_KEY"
MAX_BODY_BYTES = 4096


def admin_key() -> str | None:
    """The admin key from the environment; None if it is unset or empty."""
    return os.environ.get(ADMIN_KEY_ENV) or None


@dataclass(frozen=True, kw_only=True)
class AdminDependencies:
    """Everything that the admin routes need."""

    key: str | None
    """The admin key; None disables the routes."""
    plan: Callable[[], Awaitable[SpeculationPlan]]
    """Returns the plan in force. May raise EngineUnavailable."""
    override: Callable[[dict[str, Any]], Awaitable[SpeculationPlan]]
    """Changes fields of the plan and returns the new plan. May raise EngineUnavailable."""
    max_k: int
    """The configured `speculative.k`, an upper bound of every plan."""
    find: Callable[[str], Timeline | None]
    """Returns the timeline of a request id, or None."""


class PaceBody(BaseModel):
    """Changes of the pace. A field that is left out keeps its value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: PolicyName | None = None
    max_k: Annotated[int, Field(ge=0)] | None = None
    max_batch: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    enabled: bool | None = None


def add_admin_routes(app: FastAPI, dependencies: AdminDependencies) -> None:
    """Add GET and PATCH /admin/pace and GET /debug/requests/{id} to an application made by `build_api`."""

    async def get_pace(request: Request) -> Response:
        return refused(request, dependencies.key) or _plan_json(await dependencies.plan())

    async def patch_pace(request: Request) -> Response:
        refusal = refused(request, dependencies.key)
        if refusal is not None:
            return refusal
        changes = parse_pace(await read_body(request, max_bytes=MAX_BODY_BYTES), max_k=dependencies.max_k)
        return _plan_json(await dependencies.override(changes))

    async def get_request(request: Request, request_id: str) -> Response:
        refusal = refused(request, dependencies.key)
        if refusal is not None:
            return refusal
        timeline = dependencies.find(request_id)
        if timeline is None:
            message = f"No request {request_id[:200]!r} among the recent ones of this replica"
            return _error(404, message, "request_not_found")
        return Response(msgspec.json.encode(timeline), media_type="application/json")

    app.add_api_route("/admin/pace", get_pace, methods=["GET"])
    app.add_api_route("/admin/pace", patch_pace, methods=["PATCH"])
    app.add_api_route("/debug/requests/{request_id:path}", get_request, methods=["GET"])


def parse_pace(raw: bytes, *, max_k: int) -> dict[str, Any]:
    """The changes in a body, by field of the plan.

    Args:
        max_k: largest allowed value of the field `max_k`.

    Raises:
        InvalidRequest: a field has a bad value, or there are no changes.
    """
    try:
        body = PaceBody.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    if body.max_k is not None and body.max_k > max_k:
        raise InvalidRequest(
            f"max_k: {body.max_k} given; allowed are 0 to {max_k}, the configured speculative.k", field="max_k"
        )
    changes = body.model_dump(exclude_none=True)
    if not changes:
        raise InvalidRequest("Nothing to change; give policy, max_k, max_batch or enabled")
    return changes


def is_key(request: Request, key: str) -> bool:
    """Whether the request has the key. Takes the same time for every wrong key."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def refused(request: Request, key: str | None) -> Response | None:
    """The refusal of a request to an admin route; None if it has the admin key.

    Raises:
        HTTPException: there is no admin key, so there are no such routes.
    """
    if key is None:
        raise HTTPException(404)
    if is_key(request, key):
        return None
    response = _error(401, "This route needs the admin key as `Authorization: Bearer`", "invalid_admin_key")
    response.headers["www-authenticate"] = "Bearer"
    return response


def _error(status: int, message: str, code: str) -> Response:
    body = encode_error(message, "invalid_request_error", None, code)
    return Response(body, status, media_type="application/json")


def _plan_json(plan: SpeculationPlan) -> Response:
    return Response(msgspec.json.encode(asdict(plan)), media_type="application/json")
