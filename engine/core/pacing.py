"""What the controller tells an engine, and what an engine asks of its pacer.

The plan is data that changes a few times a second; the pacer is code that runs in every step. Policies live in
`autoscale`; this file fixes only the shapes, so that the engine can be tested with a pacer of three lines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import Struct

from engine.config import Method, PolicyName
from engine.core.request import Request
from engine.core.stats import StepStats
from engine.core.step import KReason
from engine.messages import WorkloadClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What all engines of an app have seen of one kind of drafts: where a new request's estimate starts."""

    method: Method
    workload: WorkloadClass
    rates: tuple[float, ...]
    """By position: probability of acceptance, given that the position is reached."""
    weights: tuple[float, ...]
    """By position: observations that the rate stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The pace in force. A dead controller leaves the last one."""

    version: int = 0
    policy: PolicyName = "goodput"
    max_k: int = 5
    """Upper bound of K for every request."""
    max_batch: int = 16
    """Policy `threshold`: no drafting at this many decoding requests or more."""
    enabled: bool = True
    """False: no drafting under any policy."""
    priors: tuple[Prior, ...] = field(default=(), compare=False)
    """Knowledge, not command: it changes all the time and makes no other plan, nor another version."""


class PlanSlot:
    """Holds the plan in force; whoever hears from the controller sets it, the loop reads it."""

    def __init__(self, plan: SpeculationPlan) -> None:
        self.current = plan


_MATCH_BOUNDS = (3, 5, 8)
NUM_MATCH_CLASSES = len(_MATCH_BOUNDS) + 1
MAX_MATCH_LEN = _MATCH_BOUNDS[-1]
"""Prompt lookup need not look further back than this."""


def match_class(match_len: int) -> int:
    """Class of a prompt lookup by the number of tokens that recurred: 0 is short, NUM_MATCH_CLASSES - 1 is long."""
    return bisect_right(_MATCH_BOUNDS, match_len)


@dataclass(frozen=True, slots=True)
class KChoice:
    """K for one request in one step, and why."""

    k: int
    reason: KReason
    k_by_match: tuple[int, ...] | None = None
    """[NUM_MATCH_CLASSES] K where the draft costs nothing but its rows: found by prompt lookup before a model, by how
    much recurred, or foreseen by a grammar (the largest). None: the same."""
    exit_threshold: float = 0.0
    """The draft goes on only while the product of its confidences so far is at least this. It knows that before it
    computes the next position, whatever token it then draws there, so the law of what is emitted stays the target's."""


class Prediction(Struct, frozen=True, kw_only=True, gc=False):
    """What a pacer expected of a finished step before it learned from that step."""

    seconds: float = 0.0
    """Predicted duration of exactly this step, in seconds; 0 where the pacer has no cost model."""
    plain_s: float = 0.0
    """Predicted duration of the same step without its drafts, in seconds."""
    expected_tokens: float = 0.0
    """Tokens the step was expected to emit."""
    expected_s: float = 0.0
    """Duration that belongs to `expected_tokens`, in seconds: predicted when K was chosen, or else `seconds`."""
    switched: Literal["on", "off"] | None = None
    """The mode that drafting changed to in this step; None where it did not change."""
    probed: bool = False
    """Whether a probe began in this step."""


class Pacer(Protocol):
    """Chooses K per request and step; a pure function of plan, batch and what it has observed."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        """One choice per request, in order; 0 <= k <= plan.max_k.

        Args:
            plan: in force.
            decodes: requests that will each yield at least one token.
            num_prefill_rows: rows of prompts that the same step is going to compute, as far as known.
        """
        ...

    def observe(self, stats: StepStats) -> Prediction:
        """Learn from a finished step, and return what was expected of it."""
        ...
