"""The metrics endpoint of one replica, in Prometheus' text format on a separate port.

Owns the conversion of a snapshot to metric families, and the HTTP server. Each replica is a scrape target, because a
load balancer would direct every scrape to a different replica. Does not know the source of the snapshots.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from threading import Thread

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from engine.errors import ConfigError, EngineUnavailable
from engine.metrics.counters import HistogramValue, LabelValues, MetricSnapshot
from engine.metrics.definitions import METRICS
from engine.metrics.labels import COMMON_LABELS
from engine.metrics.types import Metric

_log = logging.getLogger(__name__)


class SnapshotCollector:
    """A prometheus_client collector over metric snapshots.

    Args:
        read: returns a snapshot. Called once per scrape.
        common: values of COMMON_LABELS by name.
        metrics: the declarations to expose.
    """

    def __init__(
        self, read: Callable[[], MetricSnapshot], common: Mapping[str, str], metrics: Sequence[Metric] = METRICS
    ) -> None:
        self._read = read
        self._common = tuple(common[name] for name in COMMON_LABELS)
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Family]:
        """One family per declaration. A series without a value is 0."""
        snapshot = self._read()
        for metric in self._metrics:
            yield self._histogram(metric, snapshot) if metric.kind == "histogram" else self._numbers(metric, snapshot)

    def describe(self) -> list[Family]:
        """Nothing, so that registration does not read a snapshot."""
        return []

    def _numbers(self, metric: Metric, snapshot: MetricSnapshot) -> Family:
        # A counter family adds `_total` to its name only if the name lacks it.
        labels = (*COMMON_LABELS, *metric.labels)
        family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
            metric.name, _help(metric), labels=labels
        )
        counted = snapshot.numbers.get(metric.alias_of or metric.name, {})
        for values in _series(metric, counted):
            family.add_metric([*self._common, *values], counted.get(values, 0.0))
        return family

    def _histogram(self, metric: Metric, snapshot: MetricSnapshot) -> Family:
        family = HistogramMetricFamily(metric.name, _help(metric), labels=(*COMMON_LABELS, *metric.labels))
        counted = snapshot.histograms.get(metric.name, {})
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        empty = HistogramValue([0] * len(bounds))
        for values in _series(metric, counted):
            value = counted.get(values, empty)
            buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
            family.add_metric([*self._common, *values], buckets, value.total)
        return family


def _series(metric: Metric, counted: Mapping[LabelValues, object]) -> list[LabelValues]:
    known: list[LabelValues] = [()] if not metric.labels else [(value,) for value in metric.values]
    return [*known, *sorted(set(counted) - set(known))]


def _help(metric: Metric) -> str:
    return f"{metric.help} Query: {metric.query()}"


class Exporter:
    """The HTTP server. Each scrape runs in a separate thread, so `read` may block.

    It supports the plain text format only. In the OpenMetrics format the library rewrites names with colons, such as
    the aliases.

    Args:
        read: returns a snapshot. Called once per scrape.
        common: values of COMMON_LABELS by name.
        host, port: address to listen on. Port 0 takes a free port.
        num_ports: number of successive ports to try from `port` on.

    Raises:
        ConfigError: no such address can be bound.
    """

    def __init__(
        self,
        read: Callable[[], MetricSnapshot],
        common: Mapping[str, str],
        *,
        host: str,
        port: int,
        num_ports: int = 1,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SnapshotCollector(read, common))
        self._server = _listen(registry, host, range(port, port + num_ports) if port else (0,))
        self.port = int(self._server.server_address[1])
        """The port that it listens on."""
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    def render(self) -> bytes:
        """The page of a scrape now. Blocks while the numbers are read."""
        return bytes(generate_latest(self._server.registry))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(registry: CollectorRegistry, host: str, ports: Sequence[int]) -> _Server:
    """A server on the first port that is free."""
    for port in ports:
        try:
            return _Server(registry, host, port)
        except OSError as error:
            if port == ports[-1] or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"metrics_host, metrics_port: cannot listen on {host}:{port}: {error}") from None
    raise ConfigError("metrics_port: no port given")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.registry = registry
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "The only path is /metrics")
            return
        try:
            body = generate_latest(self.server.registry)
        except EngineUnavailable as error:
            self.send_error(503, str(error))
            return
        except Exception:  # noqa: BLE001 - the scrape fails with 500, the log has the cause, the server goes on
            _log.exception("a scrape failed")
            self.send_error(500, "The metrics cannot be read; see the log of the replica")
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""
