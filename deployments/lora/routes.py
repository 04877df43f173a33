"""Routes for operators: load and drop adapters. Names and bodies are those of vLLM.

Owns the bodies and the responses. The admin key is checked as on the other admin routes, see `deployments.http.admin`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from deployments.engine_client import AdapterTarget
from deployments.errors import from_validation
from deployments.http.admin import refused
from deployments.http.app import adapter_card
from deployments.http.connection import read_body
from deployments.http.dependencies import ApiDependencies
from deployments.lora.adapters import Adapters
from engine.config import ADAPTER_NAME
from engine.errors import EngineUnavailable, InvalidRequest

MAX_BODY_BYTES = 16_384


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LoadAdapterBody(_Body):
    """An adapter to load."""

    lora_name: Annotated[str, Field(pattern=ADAPTER_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder on the server's node, in the layout of `peft`."""


class UnloadAdapterBody(_Body):
    """An adapter to drop."""

    lora_name: str


B = TypeVar("B", bound=_Body)


@dataclass(frozen=True, kw_only=True)
class AdapterRoutes:
    """What the routes need."""

    key: str | None
    """The admin key; None disables the routes."""
    adapters: Adapters
    find: Callable[[float], Awaitable[AdapterTarget]]
    """Returns the target that serves, within so many seconds."""
    is_alone: bool
    """Whether this replica is the only one. Others would not know of the adapter."""


def add_adapter_routes(app: FastAPI, routes: AdapterRoutes) -> None:
    """Add `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    async def load(request: Request) -> Response:
        refusal = refused(request, routes.key)
        if refusal is not None:
            return refusal
        body = await _parsed(request, LoadAdapterBody, routes)
        served = await routes.adapters.load(body.lora_name, Path(body.lora_path), routes.find)
        dependencies: ApiDependencies | None = request.app.state.dependencies
        if dependencies is None:
            raise EngineUnavailable("The server is starting; try again soon")
        return _json(adapter_card(served, dependencies))

    async def unload(request: Request) -> Response:
        refusal = refused(request, routes.key)
        if refusal is not None:
            return refusal
        body = await _parsed(request, UnloadAdapterBody, routes)
        await routes.adapters.unload(body.lora_name, routes.find)
        return _json({"id": body.lora_name, "object": "model", "deleted": True})

    app.add_route("/v1/load_lora_adapter", load, methods=["POST"])
    app.add_route("/v1/unload_lora_adapter", unload, methods=["POST"])


async def _parsed(request: Request, body_type: type[B], routes: AdapterRoutes) -> B:
    """The body.

    Raises:
        InvalidRequest: a field has a bad value, or the app may have several replicas.
    """
    if not routes.is_alone:
        raise InvalidRequest(
            "Adapters are loaded into one replica only, and this app may have several; name them under "
            "engine.lora.adapters and deploy again"
        )
    try:
        return body_type.model_validate_json(await read_body(request, max_bytes=MAX_BODY_BYTES))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
