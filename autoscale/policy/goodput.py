"""The policy `goodput`: draft where it adds most tokens per second, and not at all where it adds none.

Joins what is known (cost model, acceptance) with the allocation and the switch. Its clock is the sum of the steps it
was told of. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autoscale.policy.acceptance_rate import Acceptance, kind_of
from autoscale.policy.allocation import Allocation, allocate
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from autoscale.policy.lookup_k import LookupK
from autoscale.policy.switch import HysteresisSwitch, Mode, SwitchParams
from engine.config import DRAFT_METHODS, MAX_K
from engine.core.pacing import NUM_MATCH_CLASSES, KChoice, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats

PROBE_REQUESTS = 2
PROBE_K = 2
CATCH_UP_STEPS = 64
"""Steps over which the price of letting the draft read what it missed is spread."""
KEPT_STEPS = 8
"""So long a choice holds while the batch stays the same, or nothing is drafted: choosing takes time from the steps."""
WIDE_SEARCH_CHOICES = 4
PRICED_ROWS = 4  # rows over which the price of one row is averaged
DEFAULT_SWITCH = SwitchParams()
FIRST_ANSWER_LEN = 128.0
"""Tokens of an answer before one has ended."""
LENGTH_RATE = 0.05
"""Weight of a request in the mean lengths of prompts and answers."""
GOOD_DRAFT = 0.9
"""Acceptance at which a load that drafts could pay for would show it."""

_OFF = KChoice(0, "off")
_NOT_BELIEVED, _TOO_MANY, _BASELINE = (KChoice(0, reason) for reason in ("acceptance", "batch", "probe"))
_CHOICES = (_NOT_BELIEVED, *(KChoice(k, "plan") for k in range(1, MAX_K + 1)))
_NO_LOOKUP = (0,) * NUM_MATCH_CLASSES
_PROBES = tuple(KChoice(k, "probe") for k in range(PROBE_K + 1))


@dataclass(frozen=True, slots=True)
class _BatchFacts:
    """What changes slowly about a batch."""

    requests: Sequence[Request]
    keys: Sequence[int]
    kinds: npt.NDArray[np.int64]
    """[B] rows in `Acceptance`."""
    kind_list: list[int]
    """The same."""
    beyond: npt.NDArray[np.bool_] | None
    """[B, max_k] positions that a request may not get; None when all may get all."""


class Goodput:
    """Implements `engine.core.pacing.Pacer`.

    Args:
        cost: of this engine's steps.
        acceptance: of this engine's draft.
        max_k: bound under every plan.
        method: of drafting; priors of another one are left alone.
        free: for prompt lookup that is asked before the method; None where that is not done.
    """

    def __init__(
        self,
        cost: CostModel,
        acceptance: Acceptance,
        *,
        max_k: int,
        method: str = "",
        lookup: LookupK | None = None,
        switch: SwitchParams = DEFAULT_SWITCH,
    ) -> None:
        self.cost = cost
        self.acceptance = acceptance
        self.switch = HysteresisSwitch(switch)
        self._max_k = max_k
        self._method = method
        self.lookup = lookup
        self._now_s = 0.0
        self._num_choices = 0
        self._depth = 1
        self._batch = _BatchFacts((), (), np.zeros(0, dtype=np.int64), [], None)
        self._missed = 0.0
        self._prompt_len, self._answer_len = 0.0, FIRST_ANSWER_LEN
        self._price = 0.0
        self._k_by_match: list[tuple[int, ...]] = []
        self._kept: Sequence[KChoice] = ()
        self._kept_plan: SpeculationPlan | None = None
        self._kept_place: tuple[Sequence[int], int] = ((), 0)  # keys of the batch, rows of prompts
        self._kept_steps = 0
        self._idle: KChoice | None = None  # while off: what everybody gets, whoever comes and goes
        self._made: dict[tuple[int, int], KChoice] = {}  # choices at these prices, by id of the bare one and kind
        self._priors: tuple[Prior, ...] = ()
        self._known: dict[int, int] = {}  # request key -> tokens the draft has read
        self._optimist = GOOD_DRAFT ** np.arange(1, max_k + 1)
        self.predicted: Allocation | None = None
        """Of the step chosen last; None where there was nothing to choose."""

    @property
    def num_tracked(self) -> int:
        """Requests something is remembered of."""
        return max(len(self._known), self.acceptance.num_tracked)

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        width = min(plan.max_k, self._max_k)
        if not decodes or width == 0:
            self.predicted = None
            return [_OFF] * len(decodes)
        keys = [request.key for request in decodes]
        place = (keys, num_prefill_rows)
        if plan is self._kept_plan and self._kept_steps > 0:
            self._kept_steps -= 1
            if place == self._kept_place:
                return self._kept
            if self._idle is not None:
                self.predicted = None
                kinds = [kind_of(request.submit.sampling.workload) for request in decodes]
                return self._complete_all([self._idle] * len(decodes), kinds)
        self._kept = self._choose(plan, decodes, keys, num_prefill_rows, width)
        self._kept_plan, self._kept_place = plan, place
        return self._kept

    def _choose(
        self, plan: SpeculationPlan, decodes: Sequence[Request], keys: list[int], num_prefill_rows: int, width: int
    ) -> Sequence[KChoice]:
        if plan.priors is not self._priors:
            self._priors = plan.priors
            self.acceptance.believe([prior for prior in plan.priors if prior.method == self._method])
        best, plain_s, prompts_s = self._best(decodes, keys, width, num_prefill_rows)
        gain = best.goodput * plain_s / len(decodes)
        worth_probing = self.switch.is_on or self._could_pay(len(decodes), plain_s, num_prefill_rows)
        mode = self.switch.decide(
            gain, self._now_s, worth_probing=worth_probing, has_lookup_drafts=any(map(any, self._k_by_match))
        )
        chosen = best if mode == "on" else Allocation(best.ks * 0, float(len(decodes)), plain_s)
        self.predicted = replace(chosen, seconds=chosen.seconds + prompts_s)
        rows = len(decodes) + num_prefill_rows + int(chosen.ks.sum())
        self._reprice(best, rows, width, max(chosen.goodput, len(decodes) / plain_s))
        if mode == "on":
            bare = [_CHOICES[k] for k in best.ks.tolist()]
        else:
            bare = self._unless_on(mode, decodes, width, worth_probing=worth_probing)
        self._idle = bare[0] if mode == "off" else None
        self._kept_steps = KEPT_STEPS - 1 if mode in ("on", "off") else 0
        return self._complete_all(bare, self._batch.kind_list)

    def _unless_on(self, mode: Mode, decodes: Sequence[Request], width: int, *, worth_probing: bool) -> list[KChoice]:
        if mode == "baseline":
            return [_BASELINE] * len(decodes)
        choices = [_NOT_BELIEVED if worth_probing else _TOO_MANY] * len(decodes)
        if mode == "probe":
            willing = [i for i, r in enumerate(decodes) if r.submit.speculative.enabled]
            if worth_probing:  # acceptance is in doubt: a few requests tell it
                willing, k = willing[: max(PROBE_REQUESTS, len(willing) // 8)], min(PROBE_K, width)
            else:  # costs are in doubt: what would be chosen if they were lower
                k = 1
            for index in willing:
                choices[index] = _PROBES[k]
        return choices

    def _reprice(self, best: Allocation, rows: int, width: int, goodput: float) -> None:
        """What a position must yield to pay: goodput times the seconds of its row, and of its share of a pass."""
        row_s = self.cost.row_s(rows, PRICED_ROWS)
        deep = max(1, int((best.ks > 1).sum()))
        self._price = goodput * (row_s + self.cost.pass_s(deep) / deep**2)
        if self.lookup is not None:
            self._k_by_match = self.lookup.ks(tokens_per_s=goodput, row_s=row_s, width=width)
        self._made.clear()

    def _complete_all(self, bare: Sequence[KChoice], kinds: Sequence[int]) -> list[KChoice]:
        made = self._made
        # A bare choice is one of this module's constants, so its id names it for good.
        places = zip(bare, kinds, strict=True)
        return [made.get((id(choice), kind)) or self._complete(choice, kind) for choice, kind in places]

    def _complete(self, bare: KChoice, kind: int) -> KChoice:
        """With the floor of confidence, and K of drafts that cost nothing but their rows."""
        exit_threshold, k_by_match = 0.0, None
        if bare.k > 1 and self.acceptance.has_confidences:
            cumulative_acceptance = self._price / max(1e-3, self.acceptance.deeper(kind))
            exit_threshold = self.acceptance.confidence_of(cumulative_acceptance, kind)
        if self.lookup is not None:
            k_by_match = _NO_LOOKUP if bare is _BASELINE else self._k_by_match[kind]
        done = self._made[id(bare), kind] = replace(bare, k_by_match=k_by_match, exit_threshold=exit_threshold)
        return done

    def observe(self, stats: StepStats) -> None:
        self._now_s += stats.step_s
        self.cost.observe(stats)
        outcomes = stats.outcomes
        if self.lookup is not None:
            self.lookup.observe(outcomes, stats.ended)
        outcomes = tuple([outcome for outcome in outcomes if outcome.source == "method"])
        self.acceptance.observe(outcomes)
        self.acceptance.forget(stats.ended)
        if outcomes:
            self.switch.drafted(self._now_s)
        for outcome in outcomes:
            self._known[outcome.key] = outcome.num_tokens
        for key in stats.ended:
            self._known.pop(key, None)

    def _best(
        self, decodes: Sequence[Request], keys: list[int], width: int, num_prefill_rows: int
    ) -> tuple[Allocation, float, float]:
        """The best allocation, the duration of the step without drafts and prompts, and what the prompts add.

        Prompts must be computed whatever is drafted beside them, so their time is nobody's gain: counted in, it would
        make a row look cheap where the next steps yield the same token for less. What a row adds is priced beside them.
        """
        depths = self._depths(keys, decodes, width)
        batch, facts = len(keys), self._batch
        rows = batch + num_prefill_rows
        context = sum([request.num_computed for request in decodes])
        deepest = max(depths)
        cumulative_acceptance = self.acceptance.cumulative_acceptance_of(keys, facts.kinds, deepest)
        if facts.beyond is not None:
            cumulative_acceptance[facts.beyond[:, :deepest]] = 0.0
        plain_s = self.cost.step_s(batch, context)
        best = allocate(
            cumulative_acceptance,
            base_s=plain_s,
            fixed_s=self.cost.handoff_s
            + self.cost.catch_up_s * self._catch_up_tokens(batch + float(cumulative_acceptance[:, 0].sum())),
            pass_s=self.cost.pass_s(batch),
            added_s=self.cost.added_rows_s(rows, cumulative_acceptance.size),
            depths=depths,
        )
        self._depth = max(1, best.depth)
        whole_s = self.cost.step_s(rows, context, num_prompt_rows=num_prefill_rows)
        return best, plain_s, whole_s - plain_s

    def _catch_up_tokens(self, tokens: float) -> float:
        """Committed tokens that the draft reads per step: what a step yields, its share of prompts, what was missed."""
        return tokens * (1 + self._prompt_len / self._answer_len) + self._missed / CATCH_UP_STEPS

    def _depths(self, keys: list[int], decodes: Sequence[Request], width: int) -> range:
        """The depth chosen last and a neighbour, in turns; all of them when the batch has changed, and now and then.

        The latter is also when slow facts are looked up again: kinds, caps, and what the draft has not read.
        """
        self._num_choices += 1
        if keys == self._batch.keys and self._num_choices % WIDE_SEARCH_CHOICES:
            depth = min(width, self._depth)
            return (
                range(max(1, depth - 1), depth + 1)
                if self._num_choices % 2
                else range(depth, min(width, depth + 1) + 1)
            )
        self._note_lengths(decodes)
        kinds = [kind_of(request.submit.sampling.workload) for request in decodes]
        caps = np.array([_cap(request, self._max_k) for request in decodes])
        beyond = np.arange(self._max_k)[None, :] >= caps[:, None]
        self._batch = _BatchFacts(decodes, keys, np.array(kinds), kinds, beyond if beyond.any() else None)
        known = self._known
        missed = sum([len(request.tokens) - known.get(request.key, 0) for request in decodes]) - len(keys)
        self._missed = float(max(0, missed))
        return range(1, width + 1)

    def _note_lengths(self, decodes: Sequence[Request]) -> None:
        before = set(self._batch.keys)
        for request in decodes:
            if request.key not in before:
                self._prompt_len += (LENGTH_RATE if self._prompt_len else 1.0) * (request.num_prompt - self._prompt_len)
        for request in self._batch.requests:
            if request.finish_reason is not None:
                self._answer_len += LENGTH_RATE * (request.num_generated - self._answer_len)

    def _could_pay(self, batch: int, plain_s: float, num_prefill_rows: int) -> bool:
        """Whether one more drafted token each would pay if the draft were good."""
        rows = batch + num_prefill_rows
        seconds = plain_s + self.cost.handoff_s + self.cost.pass_s(batch)
        seconds += batch * self.cost.row_s(rows, batch)
        return float(1 + self._optimist[0]) / seconds > 1 / plain_s


def _cap(request: Request, width: int) -> int:
    """Drafts that this request may get at all."""
    options = request.submit.speculative
    if not options.enabled:
        return 0
    left = request.submit.sampling.max_tokens - request.num_generated - 1
    return max(0, min(width, left, width if options.max_k is None else options.max_k))


PRIORS: dict[str, tuple[float, ...]] = {
    "none": (0.0,),
    "ngram": (0.4, 0.6, 0.7),  # given that something matched; a long match goes on matching
    "draft_model": (0.75,),
    "eagle": (0.75,),
}
"""Acceptance by position before anything was seen, per drafting method. Hopeful on purpose: a step or two of drafting
tells the truth, while a draft that is never tried never shows it."""
UNMEASURED = CostTable((0.01,) * len(ROW_KNOTS), (0.0,) * len(BATCH_KNOTS))
"""Costs nothing is known of: drafting is as good as free until the first steps have taught otherwise."""


def make_goodput(method: str, max_k: int, table: CostTable = UNMEASURED, *, lookup: bool = False) -> Goodput:
    """The policy for one engine.

    Args:
        method: of drafting; chooses the prior.
        max_k: bound under every plan.
        table: costs measured at start.
        lookup: whether prompt lookup is asked before a model.
    """
    lookup_k = LookupK(max_k) if method in DRAFT_METHODS and lookup else None
    lookup_k = LookupK(max_k) if method in DRAFT_METHODS and lookup else None
    cost, acceptance = CostModel(table, measured=table is not UNMEASURED), Acceptance(max_k, PRIORS[method])
    return Goodput(cost, acceptance, max_k=max_k, method=method, lookup=lookup_k)
