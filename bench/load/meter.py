"""What a server did between two points in time, by its metrics.

Owns the scrape of one replica's metrics and the figures that follow from two scrapes. Counting in the engine avoids the
error that a client makes at both ends of its window.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import EngineUnavailable

PACE_SWITCHES = ("gain", "acceptance", "batch")
"""Causes of switches that the policy decides."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics of a replica at one point in time."""

    time_s: float
    """Monotonic time in seconds."""
    values: dict[str, float]
    """Values by name, summed over label values."""
    switches: float
    """Number of switches that the policy decided."""
    errors: dict[float, float]
    """Cumulative number of steps by upper bound of the cost model's relative error."""


class Meter:
    """Reads the metrics of the only replica of a server, within `async with`.

    Args:
        targets: folder into which the replica writes the address of its metrics (PACELINE_METRICS_DIR).

    Raises:
        EngineUnavailable: the folder does not hold exactly one target.
    """

    def __init__(self, targets: Path) -> None:
        files = sorted(targets.glob("*.json"))
        if len(files) != 1:
            raise EngineUnavailable(f"{targets}: {len(files)} metrics targets found, one replica expected")
        (target,) = json.loads(files[0].read_text())
        self._client = httpx.AsyncClient()
        self._url = f"http://{target['targets'][0]}/metrics"

    async def read(self) -> Snapshot:
        """Scrape now. The time is that of the middle of the scrape."""
        begin = time.monotonic()
        text = (await self._client.get(self._url, timeout=10.0)).text
        at = (begin + time.monotonic()) / 2
        values: dict[str, float] = {}
        errors: dict[float, float] = {}
        switches = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "paceline_cost_error_ratio_bucket":
                    errors[float(sample.labels["le"])] = sample.value
                elif not sample.name.endswith("_bucket"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
                if sample.name == "paceline_switches_total" and sample.labels["cause"] in PACE_SWITCHES:
                    switches += sample.value
        return Snapshot(at, values, switches, errors)

    async def over(self, seconds: float) -> Window:
        """Measure from now on for `seconds`."""
        before = await self.read()
        await asyncio.sleep(seconds)
        return Window.between(before, await self.read())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a server did within an interval."""

    seconds: float
    """Length of the interval."""
    tokens: float
    """Emitted tokens."""
    num_verdicts: float
    """Requests that got a token, added up over steps."""
    num_drafted: float
    """Verified draft tokens."""
    num_accepted: float
    """Accepted draft tokens."""
    num_switches: float
    """Switches that the policy decided."""
    mean_batch: float
    """Mean number of decoding requests per step."""
    errors: dict[float, float]
    """Cumulative number of steps by upper bound of the cost model's relative error."""

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Window:
        """The difference between two snapshots."""

        def grown(name: str) -> float:
            return after.values.get(f"paceline_{name}", 0.0) - before.values.get(f"paceline_{name}", 0.0)

        return cls(
            seconds=after.time_s - before.time_s,
            tokens=grown("emitted_tokens_total"),
            num_verdicts=grown("verdicts_total"),
            num_drafted=grown("drafted_tokens_total"),
            num_accepted=grown("accepted_tokens_total"),
            num_switches=after.switches - before.switches,
            mean_batch=grown("batch_requests_sum") / max(1.0, grown("batch_requests_count")),
            errors={bound: count - before.errors.get(bound, 0.0) for bound, count in after.errors.items()},
        )

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second over all requests."""
        return self.tokens / self.seconds

    @property
    def mean_k(self) -> float:
        """Draft tokens per request and step."""
        return self.num_drafted / max(1.0, self.num_verdicts)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of drafted tokens; None where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


def quantile(errors: dict[float, float], share: float) -> float:
    """Quantile of a cumulative histogram, interpolated linearly within buckets; nan when it is empty."""
    total = max(errors.values(), default=0.0)
    if total <= 0:
        return math.nan
    low, below = 0.0, 0.0
    for bound in sorted(errors):
        count = errors[bound]
        if count >= share * total:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (share * total - below) / max(1e-12, count - below)
        low, below = bound, count
    return low


def add_errors(parts: list[dict[float, float]]) -> dict[float, float]:
    """Sum of cumulative histograms with the same buckets."""
    total: dict[float, float] = {}
    for part in parts:
        for bound, count in part.items():
            total[bound] = total.get(bound, 0.0) + count
    return total
