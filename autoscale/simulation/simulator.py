"""A simulated load under any policy: goodput, regret against an oracle, number of switches.

Owns a machine (a cost table with noise), a workload (number of streams over time, acceptance of each draft token) and
their replay through a `Pacer`, step by step, without a model and without a clock. The default parameters of the policy
`goodput` are chosen with it, and a test bounds their regret.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoscale.policy.allocation import allocate
from autoscale.policy.cost_model import CostModel, CostTable
from engine.core.pacing import KChoice, Pacer, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome, StepStats
from engine.messages import SamplingParams, Submit

NOISE = 0.05
"""Relative standard deviation of a step's duration."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one workload.

    The acceptance rate of a request is drawn once and holds at every position, so a pacer can learn it per request.
    """

    name: str
    """Name for reports."""
    acceptance: float
    """Mean acceptance rate of a drafted token."""
    spread: float = 0.1
    """Standard deviation of the acceptance rate between requests."""
    mean_tokens: int = 128
    """Mean length of a response in tokens."""
    prompt_len: int = 200
    """Length of a prompt in tokens."""
    certainty: float = 0.0
    """Standard deviation of the acceptance rate between positions of one request. The draft reports it as its
    confidence; 0 means that the draft reports none."""


WORKLOADS = {
    "summarization": Workload("summarization", 0.8),
    "code": Workload("code", 0.75),
    "chat": Workload("chat", 0.6),
    "high temperature": Workload("high temperature", 0.35),
    "adversarial": Workload("adversarial", 0.0, spread=0.0),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulated run."""

    tokens: int
    """Emitted tokens."""
    seconds: float
    """Simulated duration in seconds."""
    switches: int
    """Changes between steps with drafts and steps without any."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Simulation:
    """Closed-loop streams on one engine.

    Args:
        table: true costs, which the pacer does not know.
        workload: of every stream.
        streams: number of streams as a function of the time in seconds.
        seed: of all random numbers.
        noise: relative standard deviation of a step's duration.
        slowdown: factor on every duration, as other processes cause it, as a function of the time in seconds.
    """

    def __init__(
        self,
        table: CostTable,
        workload: Workload,
        streams: Callable[[float], int],
        *,
        seed: int = 0,
        noise: float = NOISE,
        slowdown: Callable[[float], float] = lambda _: 1.0,
    ) -> None:
        self._cost = CostModel(table)
        self._workload = workload
        self._streams = streams
        self._seed = seed
        self._noise = noise
        self._slowdown = slowdown
        self._factor = 1.0
        self._read: dict[int, int] = {}  # request key -> tokens the draft has read

    def run(self, pacer: Pacer, plan: SpeculationPlan, duration_s: float) -> Outcome:
        """Serve for `duration_s` simulated seconds under one plan."""
        rng = np.random.default_rng(self._seed)
        live: list[Request] = []
        truth: dict[int, float] = {}
        now_s, tokens, switches, was_on = 0.0, 0, 0, True
        step_id = 0
        while now_s < duration_s:
            self._fill(live, truth, self._streams(now_s), rng)
            choices = pacer.choose(plan, live, 0)
            if isinstance(pacer, Oracle):
                choices = pacer.with_truth(plan, live, truth)
            step_id += 1
            self._factor = self._slowdown(now_s)
            stats = self._step(step_id, live, truth, choices, rng)
            pacer.observe(stats)
            now_s += stats.step_s
            tokens += stats.num_emitted
            is_on = stats.num_drafted > 0
            switches += is_on != was_on
            was_on = is_on
            live = [request for request in live if request.finish_reason is None]
        return Outcome(tokens, now_s, switches)

    def _fill(self, live: list[Request], truth: dict[int, float], wanted: int, rng: np.random.Generator) -> None:
        workload = self._workload
        while len(live) < wanted:
            key = len(truth)
            truth[key] = float(np.clip(rng.normal(workload.acceptance, workload.spread), 0.0, 0.97))
            length = max(8, int(rng.exponential(workload.mean_tokens)))
            sampling = SamplingParams(max_tokens=length)
            submit = Submit(request_id=str(key), prompt=(0,) * workload.prompt_len, sampling=sampling)
            live.append(
                Request(
                    submit=submit,
                    key=key,
                    stream_key=0,
                    tokens=[0] * workload.prompt_len,
                    num_computed=workload.prompt_len - 1,
                )
            )
        del live[wanted:]

    def _step(
        self,
        step_id: int,
        live: Sequence[Request],
        truth: dict[int, float],
        choices: Sequence[KChoice],
        rng: np.random.Generator,
    ) -> StepStats:
        outcomes: list[RowOutcome] = []
        emitted = caught_up = 0
        context = sum(request.num_computed for request in live)
        reasons: dict[str, int] = {}
        for request, choice in zip(live, choices, strict=True):
            k = max(0, min(choice.k, request.submit.sampling.max_tokens - request.num_generated - 1))
            if k > 0:  # the draft reads the tokens that it has not read, then drafts
                caught_up += len(request.tokens) - self._read.get(request.key, 0)
                self._read[request.key] = len(request.tokens)
            drafted, accepted, confidences = self._draft(truth[request.key], k, choice.exit_threshold, rng)
            request.tokens += [0] * (accepted + 1)
            request.num_computed += accepted + 1
            emitted += accepted + 1
            reasons[choice.reason] = reasons.get(choice.reason, 0) + 1
            if k > 0:
                counts = (drafted, accepted, len(request.tokens))
                num_asked = k if choice.exit_threshold > 0 else 0
                workload = request.submit.sampling.workload
                outcomes.append(RowOutcome(request.key, *counts, workload, num_asked, confidences))
            if request.num_generated >= request.submit.sampling.max_tokens:
                request.finish_reason = "length"
        return self._stats(step_id, live, outcomes, emitted, context, caught_up, reasons, rng)

    def _draft(
        self, rate: float, k: int, exit_threshold: float, rng: np.random.Generator
    ) -> tuple[int, int, tuple[float, ...]]:
        """Numbers of drafted and accepted tokens, and the draft's confidences where it reports them."""
        if self._workload.certainty == 0:
            accepted = 0
            while accepted < k and rng.random() < rate:
                accepted += 1
            return k, accepted, ()
        confidences: list[float] = []
        accepted = 0
        cumulative_confidence = 1.0
        while len(confidences) < k and cumulative_confidence >= exit_threshold:
            confidence = float(np.clip(rng.normal(rate, self._workload.certainty), 0.02, 0.98))
            accepted += accepted == len(confidences) and rng.random() < confidence
            confidences.append(confidence)
            cumulative_confidence *= confidence
        return len(confidences), accepted, tuple(confidences)

    def _stats(
        self,
        step_id: int,
        live: Sequence[Request],
        outcomes: Sequence[RowOutcome],
        emitted: int,
        context: int,
        caught_up: int,
        reasons: dict[str, int],
        rng: np.random.Generator,
    ) -> StepStats:
        noise = self._factor * float(np.exp(rng.normal(0.0, self._noise)))
        rows = len(live) + sum(outcome.num_drafted for outcome in outcomes)
        depth = max((outcome.num_drafted for outcome in outcomes), default=0)
        verify_s = self._cost.verify_s(rows, context) * noise
        draft_s = (self._cost.draft_s(len(outcomes), depth, caught_up) - self._cost.handoff_s) * noise if depth else 0.0
        handoff_s = self._cost.handoff_s if depth else 0.0
        reached = [sum(min(o.num_accepted + 1, o.num_drafted) > j for o in outcomes) for j in range(depth)]
        return StepStats(
            step_id=step_id,
            num_decodes=len(live),
            num_prefill_tokens=0,
            num_waiting=0,
            num_rows=rows,
            context_len=context,
            num_drafted=rows - len(live),
            num_accepted=sum(outcome.num_accepted for outcome in outcomes),
            num_emitted=emitted,
            accepted_by_position=tuple(sum(o.num_accepted > j for o in outcomes) for j in range(depth)),
            drafted_by_position=tuple(reached),
            depth=depth,
            k_by_reason=reasons,
            outcomes=tuple(outcomes),
            num_caught_up=caught_up,
            ended=tuple(request.key for request in live if request.finish_reason is not None),
            accepted_per_finished=tuple(
                outcome.num_accepted
                for outcome, request in ((o, r) for o in outcomes for r in live if r.key == o.key)
                if request.finish_reason is not None
            ),
            schedule_s=0.0,
            draft_s=draft_s,
            handoff_s=handoff_s,
            verify_s=verify_s,
            sample_s=0.0,
            step_s=verify_s + draft_s + handoff_s + self._cost.overhead_s,
        )


class Oracle:
    """A pacer that knows the true costs and acceptance rates: an upper bound for every other pacer.

    Args:
        table: true costs.
        max_k: upper bound of K.
    """

    def __init__(self, table: CostTable, max_k: int) -> None:
        self._cost = CostModel(table)
        self._max_k = max_k

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        """No drafts; the simulation calls `with_truth` for the real choice."""
        del plan, num_prefill_rows
        return [KChoice(0, "off")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        """There is nothing to learn."""
        del stats
        return Prediction()

    def with_truth(self, plan: SpeculationPlan, live: Sequence[Request], truth: dict[int, float]) -> Sequence[KChoice]:
        """The best K for each request.

        Args:
            plan: not used.
            live: the batch.
            truth: acceptance rate by request key.
        """
        del plan
        powers = np.arange(1.0, self._max_k + 1)
        cumulative_acceptance = np.array([truth[request.key] for request in live])[:, None] ** powers
        context = sum(request.num_computed for request in live)
        rows = len(live)
        best = allocate(
            cumulative_acceptance,
            base_s=self._cost.step_s(rows, context),
            fixed_s=self._cost.ask_s,
            pass_s=self._cost.pass_s(rows),
            added_s=self._cost.added_rows_s(rows, cumulative_acceptance.size),
            depths=range(1, self._max_k + 1),
            positions_per_pass=self._cost.positions_per_pass,
        )
        return [KChoice(k, "plan") for k in best.ks.tolist()]
