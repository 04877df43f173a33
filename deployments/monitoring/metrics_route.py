"""`/metrics` on a replica's own HTTP port, beside the port that only Prometheus uses.

Owns the route. It is for a server with a single replica: behind a load balancer each scrape would reach another one.
Does not know how the page is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response


def add_metrics_route(app: FastAPI, render: Callable[[], bytes]) -> None:
    """Add the route.

    Args:
        render: the page in Prometheus' text format. It may block, so it is called in a thread.
    """

    async def metrics(request: Request) -> Response:
        del request
        return Response(await asyncio.to_thread(render), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app.add_route("/metrics", metrics, methods=["GET"])
