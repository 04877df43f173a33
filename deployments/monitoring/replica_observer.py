"""Observability of one replica: metrics and how Prometheus finds them, traces, request log and timelines.

Owns the wiring and the lifecycle: created before the engine serves, started with it, closed when the replica stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from autoscale.control.metric_targets import ANNOUNCE_PERIOD_S, MetricTarget
from deployments.engine_client import EngineClient
from deployments.monitoring.discovery import TargetFile, clear_dead, targets_folder
from deployments.monitoring.exporter import Exporter
from deployments.monitoring.request_log import AdapterLabels, count_request, log_as_json, log_request
from deployments.monitoring.timelines import Sink, TimedEngine
from deployments.monitoring.tracing import Tracing, make_exporter
from deployments.settings import AppSettings
from engine.errors import EngineUnavailable
from engine.metrics.counters import MetricCounters, MetricSnapshot, merge

READ_TIMEOUT_S = 5.0
"""Seconds in which the engine's metrics must be read. The processes of a busy machine may take longer."""
WILDCARDS = ("0.0.0.0", "::")


class ReplicaObserver:
    """Observes one replica.

    Args:
        settings: of the app.
        engine: the engine to observe. The attribute `engine` wraps it and records every request.
        read_engine: returns the metrics of the engine's processes.
        app, replica: values of these labels.
        read_timeout_s: seconds that `read_engine` may take.

    Raises:
        ConfigError: the settings ask for traces that cannot be written or sent.
    """

    def __init__(
        self,
        settings: AppSettings,
        engine: EngineClient,
        read_engine: Callable[[], Awaitable[MetricSnapshot]],
        *,
        app: str,
        replica: str,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._read_timeout_s = read_timeout_s
        self._read_engine = read_engine
        self._labels = {"app": app, "replica": replica, "model": settings.served_name}
        self._counters = MetricCounters()
        self._exporter: Exporter | None = None
        self._folder = targets_folder(settings.metrics_dir)
        self._file = TargetFile(self._folder, replica)
        sinks: list[Sink] = [partial(count_request, counters=self._counters, labels=AdapterLabels())]
        if settings.log_format == "json":
            log_as_json()
            sinks.append(log_request)
        spans = make_exporter(settings.trace_file, settings.trace_endpoint)
        self._tracing = Tracing(spans, self._labels) if spans is not None else None
        if self._tracing is not None:
            sinks.append(self._tracing.record)
        self.engine = TimedEngine(engine, sinks, keep=settings.num_timelines)

    def start(self, loop: asyncio.AbstractEventLoop, *, node_ip: str, node_id: str) -> MetricTarget:
        """Start the metrics endpoint and write its target file. Returns the target.

        Args:
            loop: the event loop in which `read_engine` runs. Scrapes come from other threads.
            node_ip: host of the target if `metrics_host` is a wildcard.
            node_id: Ray's id of this node.

        Raises:
            ConfigError: the endpoint's address cannot be bound.
        """
        settings = self._settings
        self._counters.set("paceline_start_time_seconds", time.time())
        self._exporter = Exporter(
            lambda: self.read(loop),
            self._labels,
            host=settings.metrics_host,
            port=settings.metrics_port,
            num_ports=settings.most_replicas + 1,  # in an upgrade a node may have an old and a new replica
        )
        port = self._exporter.port
        host = node_ip if settings.metrics_host in WILDCARDS else settings.metrics_host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        target = MetricTarget(address=address, labels=self._labels, node_id=node_id)
        self._file.write(target)
        return target

    async def announce(
        self,
        target: MetricTarget,
        send: Callable[[MetricTarget], Awaitable[frozenset[str]]],
        *,
        period_s: float = ANNOUNCE_PERIOD_S,
    ) -> None:
        """Announce the target until this is cancelled, and remove the target files of nodes that are gone.

        Args:
            target: from `start`.
            send: announces it and returns the ids of the nodes that are gone. It may raise EngineUnavailable; then
                the next announcement is tried.
            period_s: seconds between two announcements.
        """
        while True:
            with contextlib.suppress(EngineUnavailable):
                await asyncio.to_thread(clear_dead, self._folder, await send(target))
            await asyncio.sleep(period_s)

    def count_refusal(self, cause: str) -> None:
        """Count a request that was refused before it reached the engine, by cause."""
        self._counters.add("paceline_rejected_total", 1, cause)

    def read(self, loop: asyncio.AbstractEventLoop) -> MetricSnapshot:
        """The metrics of all processes of the replica. Call it from any thread except the loop's.

        Raises:
            EngineUnavailable: the engine was not read in time.
        """

        async def ask() -> MetricSnapshot:
            return await self._read_engine()

        reading = asyncio.run_coroutine_threadsafe(ask(), loop)
        try:
            engine = reading.result(self._read_timeout_s)
        except TimeoutError:
            reading.cancel()
            raise EngineUnavailable(
                f"The engine's metrics were not read within {self._read_timeout_s:g} s; try again soon"
            ) from None
        return merge([self._counters.read(), engine])

    def render(self) -> bytes:
        """The metrics page. From any thread but the loop's.

        Raises:
            EngineUnavailable: the observer does not run, or the engine was not read in time.
        """
        if self._exporter is None:
            raise EngineUnavailable("The metrics are not read now")
        return self._exporter.render()

    def close(self) -> None:
        """Remove the target file and stop the endpoint. Blocks for up to a second. Calling it twice has no effect."""
        self._file.remove()
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None
