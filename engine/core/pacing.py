"""The pace: how many tokens to draft for each request in each step, and the interface to what chooses it.

The controller sends a `SpeculationPlan`: data that changes a few times a second. In every step the engine asks its
`Pacer` for one `KChoice` per decoding request. Policies live in `autoscale`. This file owns the interface only, so that
an engine can be tested with a pacer of three lines.
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
    """Acceptance that all engines of an app observed for a method, workload and adapter. New requests start from it."""

    method: Method
    """Drafting method that was observed."""
    workload: WorkloadClass
    """Workload class that was observed."""
    rates: tuple[float, ...]
    """Probability of acceptance at each draft position, given that the position is reached."""
    weights: tuple[float, ...]
    """Number of observations behind each rate."""
    adapter: str = ""
    """Name of the adapter that was observed; empty for the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """What the controller asks of an engine's pacer. Without a controller, the last plan stays in force."""

    version: int = 0
    """Number of the plan; grows with every change other than of `priors`."""
    policy: PolicyName = "goodput"
    """How K is chosen."""
    max_k: int = 5
    """Upper bound of K for every request."""
    max_batch: int = 16
    """Policy `threshold`: no drafting at this many decoding requests or more."""
    enabled: bool = True
    """False: no drafting under any policy."""
    priors: tuple[Prior, ...] = field(default=(), compare=False)
    """Acceptance observed so far. It changes all the time; plans that differ only in it are equal."""


class PlanSlot:
    """Holds the plan in force. The controller's messages replace it; the loop reads it."""

    def __init__(self, plan: SpeculationPlan) -> None:
        self.current = plan
        """The plan in force."""


_MATCH_BOUNDS = (3, 5, 8)
NUM_MATCH_CLASSES = len(_MATCH_BOUNDS) + 1
"""Number of classes of match lengths."""
MAX_MATCH_LEN = _MATCH_BOUNDS[-1]
"""Match length, in tokens, from which on longer matches make no difference."""


def match_class(match_len: int) -> int:
    """Class of a prompt lookup by the length of its match in tokens: 0 is short, NUM_MATCH_CLASSES - 1 is long."""
    return bisect_right(_MATCH_BOUNDS, match_len)


@dataclass(frozen=True, slots=True)
class KChoice:
    """K of one request in one step, and the reason."""

    k: int
    """Draft tokens to ask the method for."""
    reason: KReason
    """Why `k` has its value."""
    k_by_match: tuple[int, ...] | None = None
    """[NUM_MATCH_CLASSES] K of drafts that cost no draft pass: of prompt lookup ahead of a model, by class of the match
    length; a grammar may draft the largest of them. None: `k` in all cases."""
    exit_threshold: float = 0.0
    """Early-exit threshold: the draft continues only while the product of its confidences is at least this; 0 turns it
    off. The product never depends on the token drawn at the next position, so the distribution of the output stays the
    target's."""
    least_acceptance: float = 0.0
    """Of a tree, only nodes that are expected to be accepted with at least this probability are verified; 0 keeps
    all."""
    node_price: float = 0.0
    """Of a tree, the tokens that the step could yield in the time that the draft takes for one node."""


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
    """Chooses K per request and step, as a function of the plan, the batch and past observations."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        """One choice per request, in order; 0 <= k <= plan.max_k.

        Args:
            plan: the plan in force.
            decodes: requests that each yield at least one token in this step.
            num_prefill_rows: estimated number of prefill rows of the same step.
        """
        ...

    def observe(self, stats: StepStats) -> Prediction:
        """Learn from a finished step, and return what was expected of it."""
        ...
