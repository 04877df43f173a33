"""What a server did between two moments, by its own counters.

Owns the scrape of one replica's metrics and the figures that follow from two of them. Counting where tokens are made
leaves out what a client's window would cut off at either end.
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
"""Causes of a switch that the policy itself decided on."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All of a replica's numbers at one moment."""

    time_s: float
    """Monotonic."""
    values: dict[str, float]
    """By name, summed over label values."""
    switches: float
    """That the policy decided on."""
    errors: dict[float, float]
    """Steps by upper bound of the cost model's relative error, cumulative."""


class Meter:
    """Reads the metrics of the only replica of a server, within `async with`.

    Args:
        targets: folder in which the replica announces where its metrics are (PACELINE_METRICS_DIR).
    """

    def __init__(self, targets: Path) -> None:
        files = sorted(targets.glob("*.json"))
        if len(files) != 1:
            raise EngineUnavailable(f"{targets}: {len(files)} metrics targets found, one replica expected")
        (target,) = json.loads(files[0].read_text())
        self._client = httpx.AsyncClient()
        self._url = f"http://{target['targets'][0]}/metrics"

    async def read(self) -> Reading:
        """The numbers now, as of the middle of the scrape."""
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
        return Reading(at, values, switches, errors)

    async def over(self, seconds: float) -> Window:
        """What happens from now on, for so long."""
        before = await self.read()
        await asyncio.sleep(seconds)
        return Window.between(before, await self.read())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a server did in a stretch of time."""

    seconds: float
    tokens: float
    """Emitted."""
    num_verdicts: float
    num_drafted: float
    num_accepted: float
    num_switches: float
    mean_batch: float
    """Decoding requests per step."""
    errors: dict[float, float]
    """Steps by upper bound of the cost model's relative error, cumulative."""

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Window:
        """What grew from one reading to a later one."""

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
        """Emitted, of all requests together."""
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
    """Of a cumulative histogram, on straight lines within its buckets; nan when it is empty."""
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
    """Cumulative histograms of several stretches as one."""
    total: dict[float, float] = {}
    for part in parts:
        for bound, count in part.items():
            total[bound] = total.get(bound, 0.0) + count
    return total
