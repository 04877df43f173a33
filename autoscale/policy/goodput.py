"""The policy `goodput`: draft where that adds most tokens per second, and not at all where it adds none.

Joins cost model, acceptance estimates, allocation and switch. Its clock is the sum of the observed step durations. No
torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoscale.policy.acceptance_rate import Acceptance, AcceptanceClasses
from autoscale.policy.allocation import Allocation, allocate
from autoscale.policy.batch_facts import BatchObserver
from autoscale.policy.choice_builder import ChoiceBuilder
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable, StepCost
from autoscale.policy.depth_search import DepthSearch
from autoscale.policy.expected_tokens import expected_tokens
from autoscale.policy.held_choice import HELD_STEPS, Chosen, HeldChoice
from autoscale.policy.lookup_k import LookupK
from autoscale.policy.switch import HysteresisSwitch, Mode, SwitchParams
from engine.config import DRAFT_METHODS
from engine.core.pacing import KChoice, Prediction, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats

PROBE_REQUESTS = 2
"""Requests that draft in a probe of acceptance, at least; else one in eight."""
PROBE_K = 2
"""K of a probe of acceptance."""
DEFAULT_SWITCH = SwitchParams()
GOOD_DRAFT = 0.9
"""Acceptance rate of a good draft, for the question whether any draft could pay."""

_OFF = KChoice(0, "off")


class Goodput:
    """Implements `engine.core.pacing.Pacer`.

    Args:
        cost: of this engine's steps.
        acceptance: of this engine's draft method.
        max_k: upper bound of K under every plan.
        method: name of the draft method; priors of other methods are not used.
        lookup: K of prompt lookup drafts that are asked before the method; None where that is not done.
        switch: parameters of the switch.
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
        self.lookup = lookup
        self.switch = HysteresisSwitch(switch)
        self._probe_steps = switch.probe_steps
        self._max_k = max_k
        self._method = method
        self._now_s = 0.0
        self._batch = BatchObserver(max_k, acceptance.classes)
        self._depth_search = DepthSearch()
        self._builder = ChoiceBuilder(cost, acceptance, lookup)
        self._held = HeldChoice(acceptance.classes)
        self._priors: tuple[Prior, ...] = ()
        self._expected: Allocation | None = None  # of the step chosen for last, until it is observed
        self._num_switches = self._num_probes = 0  # up to the step observed last

    @property
    def num_tracked(self) -> int:
        """Number of requests of which something is remembered."""
        return max(self._batch.num_tracked, self.acceptance.num_tracked)

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        """See `engine.core.pacing.Pacer`."""
        max_k = min(plan.max_k, self._max_k)
        if not decodes or max_k == 0:
            self._expected = None
            return [_OFF] * len(decodes)
        keys = [request.key for request in decodes]
        chosen = self._held.take(plan, decodes, keys, num_prefill_rows)
        if chosen is None:
            self._adopt_priors(plan)
            chosen = self._choose_anew(plan, decodes, keys, num_prefill_rows, max_k)
        self._expected = chosen.expected
        return chosen.choices

    def observe(self, stats: StepStats) -> Prediction:
        """See `engine.core.pacing.Pacer`."""
        self._now_s += stats.step_s
        prediction = self._predict(stats, self.cost.observe(stats))
        if self.lookup is not None:
            self.lookup.observe(stats.outcomes, stats.ended)
        outcomes = [outcome for outcome in stats.outcomes if outcome.source in ("method", "merged")]
        # What lookup adds to a merged tree it would have without the model too.
        self.acceptance.observe([outcome for outcome in outcomes if outcome.source == "method"])
        self.acceptance.forget(stats.ended)
        if outcomes:
            self.switch.drafted(self._now_s)
        self._batch.observe(outcomes, stats.ended)
        return prediction

    def _predict(self, stats: StepStats, cost: StepCost) -> Prediction:
        """What was expected of a step that `cost` has been observed of and `acceptance` not yet."""
        expected, self._expected = self._expected, None
        switched = self.switch.num_switches > self._num_switches
        probed = self.switch.num_probes > self._num_probes
        self._num_switches, self._num_probes = self.switch.num_switches, self.switch.num_probes
        return Prediction(
            seconds=cost.seconds,
            plain_s=cost.plain_s,
            # Another policy may have chosen this step; then its K is priced here.
            expected_tokens=expected_tokens(stats, self.acceptance, self.lookup)
            if expected is None
            else expected.tokens,
            expected_s=cost.seconds if expected is None else expected.seconds,
            switched=("on" if self.switch.is_on else "off") if switched else None,
            probed=probed,
        )

    def _adopt_priors(self, plan: SpeculationPlan) -> None:
        if plan.priors is not self._priors:
            self._priors = plan.priors
            self.acceptance.adopt([prior for prior in plan.priors if prior.method == self._method])

    def _choose_anew(
        self, plan: SpeculationPlan, decodes: Sequence[Request], keys: list[int], num_prefill_rows: int, max_k: int
    ) -> Chosen:
        best, plain_s, prompts_s = self._best(decodes, keys, max_k, num_prefill_rows)
        gain = best.goodput * plain_s / len(decodes)
        could_pay, probe_cost_s = True, 0.0
        if not self.switch.is_on:
            could_pay = self._could_pay(len(decodes), plain_s, num_prefill_rows)
            probe_cost_s = self._probe_cost_s(decodes, self._probe_ks(decodes, max_k, is_wide=not could_pay), plain_s)
        mode = self.switch.decide(
            gain,
            self._now_s,
            worth_probing=could_pay,
            probe_cost_s=probe_cost_s,
            has_lookup_drafts=self._builder.has_lookup_drafts,
        )
        used = best if mode == "on" else Allocation(best.ks * 0, float(len(decodes)), plain_s)
        rows = len(decodes) + num_prefill_rows + sum(used.ks.tolist())
        self._builder.reprice(best, rows, max_k, max(used.goodput, len(decodes) / plain_s))
        choices = self._choices(mode, best, decodes, max_k, could_pay=could_pay)
        chosen = Chosen(choices, replace(used, seconds=used.seconds + prompts_s))
        self._held.hold(
            chosen,
            plan,
            keys,
            num_prefill_rows,
            num_steps=HELD_STEPS - 1 if mode in ("on", "off") else 0,
            by_workload=self._builder.zero_by_workload(choices[0].reason) if mode == "off" else None,
        )
        return chosen

    def _choices(
        self, mode: Mode, best: Allocation, decodes: Sequence[Request], max_k: int, *, could_pay: bool
    ) -> list[KChoice]:
        build, workloads = self._builder.build, self._batch.facts.workloads
        if mode == "on":
            return build(best.ks.tolist(), workloads, reason="plan", zero_reason="acceptance")
        ks = [0] * len(decodes)
        if mode == "baseline":
            return build(ks, workloads, reason="probe", zero_reason="probe", lookup_allowed=False)
        if mode != "off":
            ks = self._probe_ks(decodes, max_k, is_wide=mode == "wide_probe")
        return build(ks, workloads, reason="probe", zero_reason="acceptance" if could_pay else "batch")

    def _probe_ks(self, decodes: Sequence[Request], max_k: int, *, is_wide: bool) -> list[int]:
        """[B] K of each request in a probe.

        Acceptance is measured with a few requests: those of which the draft has least to read. Costs are measured with
        one token of each request, which is what would be chosen if the costs were lower.
        """
        probed = [index for index, request in enumerate(decodes) if request.submit.speculative.enabled]
        k = 1
        if not is_wide:
            probed.sort(key=lambda index: self._batch.num_unread(decodes[index]))
            count = max(PROBE_REQUESTS, len(probed) // 8)
            probed, k = probed[:count], min(PROBE_K, max_k)
        ks = [0] * len(decodes)
        for index in probed:
            ks[index] = k
        return ks

    def _probe_cost_s(self, decodes: Sequence[Request], ks: Sequence[int], plain_s: float) -> float:
        """Seconds that a probe is expected to add: what it computes, less what its accepted tokens take without it."""
        cost, drafting = self.cost, [index for index, k in enumerate(ks) if k > 0]
        if not drafting:
            return 0.0
        depth = max(ks)
        cumulative_acceptance = self.acceptance.cumulative_acceptance_of(
            [decodes[index].key for index in drafting], self._batch.facts.workload_indices[drafting], depth
        )
        saved_s = float(cumulative_acceptance.sum()) * plain_s / len(decodes)
        step_s = cost.draft_s(len(drafting), depth) + float(cost.added_rows_s(len(decodes), sum(ks))[-1]) - saved_s
        num_unread = sum([self._batch.num_unread(decodes[index]) for index in drafting])
        return max(0.0, self._probe_steps * step_s + cost.catch_up_s * num_unread)

    def _best(
        self, decodes: Sequence[Request], keys: list[int], max_k: int, num_prefill_rows: int
    ) -> tuple[Allocation, float, float]:
        """The best allocation, the duration of the step without drafts and prompts, and what the prompts add.

        Prompts are computed whatever is drafted, so their time is left out of the goodput that is compared. With it a
        row would look cheap, while the following steps yield the same token for less. The cost of a drafted row does
        depend on them: it is the cost of one more row than the decodes and the prompts.
        """
        is_wide = self._depth_search.is_wide(same_batch=keys == self._batch.facts.keys)
        if is_wide:
            self._batch.refresh(decodes, keys)
        depths = self._depths(max_k, is_wide=is_wide)
        batch, facts, cost = len(keys), self._batch.facts, self.cost
        rows = batch + num_prefill_rows
        context = sum([request.num_computed for request in decodes])
        width = depths[-1]
        cumulative_acceptance = self.acceptance.cumulative_acceptance_of(keys, facts.workload_indices, width)
        if facts.disallowed is not None:
            cumulative_acceptance[facts.disallowed[:, :width]] = 0.0
        catch_up_tokens = self._batch.catch_up_tokens(batch + float(np.add.reduce(cumulative_acceptance[:, 0])))
        plain_s = cost.step_s(batch, context)
        best = allocate(
            cumulative_acceptance,
            base_s=plain_s,
            fixed_s=cost.ask_s + cost.catch_up_s * catch_up_tokens,
            pass_s=cost.pass_s(batch),
            added_s=cost.added_rows_s(rows, cumulative_acceptance.size),
            depths=depths,
            positions_per_pass=cost.positions_per_pass,
        )
        self._depth_search.found(best.depth)
        with_prompts_s = cost.step_s(rows, context, num_prompt_rows=num_prefill_rows)
        return best, plain_s, with_prompts_s - plain_s

    def _depths(self, max_k: int, *, is_wide: bool) -> Sequence[int]:
        """The depths to compare, ascending. A parallel draft has one: its single pass costs the same at every depth."""
        per_pass = self.cost.positions_per_pass
        if per_pass > 1:
            return (min(max_k, per_pass),)
        return self._depth_search.depths(max_k, is_wide=is_wide)

    def _could_pay(self, batch: int, plain_s: float, num_prefill_rows: int) -> bool:
        """Whether one more drafted token per request would pay if the draft were good."""
        rows = batch + num_prefill_rows
        seconds = plain_s + self.cost.ask_s + self.cost.pass_s(batch)
        seconds += batch * self.cost.row_s(rows, batch)
        return (1 + GOOD_DRAFT) / seconds > 1 / plain_s


PRIORS: dict[str, tuple[float, ...]] = {
    "none": (0.0,),
    "ngram": (0.4, 0.6, 0.7),  # given a match: a long match tends to continue
    "draft_model": (0.75,),
    "eagle": (0.75,),
    "medusa": (0.75,),
}
"""Acceptance rate by position before the first observation, per draft method. Optimistic on purpose: a few drafting
steps correct a rate that is too high, while a draft that is never tried never shows that its rate is higher."""
UNMEASURED = CostTable((0.01,) * len(ROW_KNOTS), (0.0,) * len(BATCH_KNOTS))
"""The cost table before anything was measured: drafting costs next to nothing until the first steps show its cost."""


def make_goodput(method: str, max_k: int, table: CostTable = UNMEASURED, *, lookup: bool = False) -> Goodput:
    """The policy for one engine.

    Args:
        method: name of the draft method; chooses the prior.
        max_k: upper bound of K under every plan.
        table: costs measured at start.
        lookup: whether prompt lookup is asked before a draft model.
    """
    classes = AcceptanceClasses()
    lookup_k = LookupK(max_k, classes) if method in DRAFT_METHODS and lookup else None
    cost, acceptance = CostModel(table, measured=table is not UNMEASURED), Acceptance(max_k, PRIORS[method], classes)
    return Goodput(cost, acceptance, max_k=max_k, method=method, lookup=lookup_k)
