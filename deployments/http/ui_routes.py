"""The web page: its files, and the measurements that it plots.

Owns which files are served with which headers, and the JSON of recent measurements. The page itself is plain HTML, CSS
and JavaScript in `ui/`, and uses the same API as every client. Does not know Ray or the source of the measurements.

    /ui           the page          /ui/data?since=<unix seconds>   sums per second, for the charts
    /ui/<file>    a file that the page loads
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from autoscale.control.history import HistoryView
from deployments.engine_client import Health
from engine.errors import InvalidRequest

FOLDER = Path(__file__).parents[1] / "ui"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
HEADERS = {
    # The page may hold an admin key, so it loads nothing from elsewhere, runs nothing inline and allows no frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PERIOD_S = 1.0
"""Seconds between two requests of the page for data."""

HistorySource = Callable[[float], Awaitable[HistoryView]]
HealthSource = Callable[[], Awaitable[Health]]


def add_ui_routes(app: FastAPI, *, model_name: str, history: HistorySource, health: HealthSource) -> None:
    """Add the page's routes.

    Args:
        app: an application made by `build_api`.
        model_name: the model that the page sends with requests.
        history: returns recent measurements from a Unix time on. May raise EngineUnavailable.
        health: returns the state of the engine.
    """
    routes = [Route("/ui", partial(_file, FOLDER / "index.html")), Route("/ui/", _to_page)]
    routes += [Route(f"/ui/{path.relative_to(FOLDER)}", partial(_file, path)) for path in served_files()]
    routes.append(Route("/ui/data", partial(_data, model_name, history, health)))
    app.router.routes.extend(routes)


def served_files() -> list[Path]:
    """All files of the page."""
    return sorted(path for path in FOLDER.rglob("*") if path.is_file())


async def _file(path: Path, request: Request) -> Response:
    del request
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)


async def _to_page(request: Request) -> Response:
    """Redirect to /ui, because the page's links are relative to an address without a slash at the end."""
    del request
    return RedirectResponse("../ui", 307)


async def _data(model_name: str, history: HistorySource, health: HealthSource, request: Request) -> Response:
    view = await history(_since(request.query_params.get("since", "0")))
    content = msgspec.json.encode(_document(view, model_name, await health()))
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _since(given: str) -> float:
    """The query parameter `since`, Unix time in seconds. Raises InvalidRequest for any other value."""
    try:
        since_s = float(given)
    except ValueError:
        since_s = -1.0
    if not 0 <= since_s < 1e12:
        raise InvalidRequest(f"since must be unix seconds, 0 or more (given: {given[:40]!r})", field="since")
    return since_s


def _document(view: HistoryView, model_name: str, health: Health) -> dict[str, Any]:
    return {
        "now": view.now_s,
        "period_s": PERIOD_S,
        "model": model_name,
        "health": health,
        "num_engines": view.num_engines,
        "plan": view.plan,
        "points": [{"t": second.time_s, **asdict(second.observation)} for second in view.seconds],
        "changes": [{"t": change.time_s, "plan": change.plan} for change in view.changes],
    }
