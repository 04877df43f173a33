"""Routes for Prometheus: `/metrics/targets`, which lists the living replicas, and `/metrics` of a single one.

Owns the routes. Any replica answers `/metrics/targets` for all, so it may be asked through Serve's proxy of any node.
`/metrics` is for a server with a single replica: behind a load balancer each scrape would reach another one. Does not
know how the page is made, nor who lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from autoscale.control.metric_targets import MetricTarget
from deployments.monitoring.discovery import entry_of

TARGETS_PATH = "/metrics/targets"


def add_metrics_route(app: FastAPI, render: Callable[[], bytes]) -> None:
    """Add the route.

    Args:
        render: the page in Prometheus' text format. It may block, so it is called in a thread.
    """

    async def metrics(request: Request) -> Response:
        del request
        return Response(await asyncio.to_thread(render), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app.add_route("/metrics", metrics, methods=["GET"])


def add_targets_route(app: FastAPI, targets: Callable[[], Awaitable[Sequence[MetricTarget]]]) -> None:
    """Add the route of Prometheus' HTTP service discovery.

    Args:
        targets: returns the living ones. While it raises EngineUnavailable, the route responds with 503 and Prometheus
            keeps the targets that it knows.
    """

    async def list_targets(request: Request) -> Response:
        del request
        entries = [entry_of(target) for target in await targets()]
        return Response(msgspec.json.encode(entries), media_type="application/json")

    app.add_route(TARGETS_PATH, list_targets, methods=["GET"])
