"""Statistics of one step, counted once for the pacer, the controller and the metrics.

Owns the counting. Knows neither policies nor metric names.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.core.step import Batch, Draft, DraftRow, DraftSource, RowVerdict, Span, Verdict
from engine.messages import Delta, WorkloadClass
from engine.tree import depths


def step_stats(
    batch: Batch,
    draft: Draft,
    verdict: Verdict,
    deltas: Sequence[Delta],
    *,
    aborted: Sequence[int] = (),
    schedule_s: float,
    step_s: float,
) -> StepStats:
    """Count one step.

    Args:
        aborted: keys of requests that were aborted since the previous step.
        schedule_s: seconds of scheduling.
        step_s: seconds of the whole step.
    """
    accepted, reached = _by_position(draft, verdict)
    num_decodes = num_prompt = context_len = num_drafted = num_accepted = 0
    k_by_reason: dict[str, int] = {}
    outcomes: list[RowOutcome] = []
    accepted_means: list[float] = []
    ended = list(aborted)
    for span, drafted, row in zip(batch.spans, draft.rows, verdict.rows, strict=True):
        request, length = span.request, drafted.num_tokens
        if span.num_tokens == 1:
            num_decodes += 1
        else:
            num_prompt += span.num_tokens
        context_len += span.start
        if span.samples:
            k_by_reason[drafted.reason] = k_by_reason.get(drafted.reason, 0) + 1
        if length:
            num_drafted += length
            num_accepted += row.num_accepted
            outcomes.append(_outcome(span, drafted, row))
        if request.finish_reason is not None:
            ended.append(request.key)
            if request.num_draft_steps:
                accepted_means.append(request.num_accepted / request.num_draft_steps)
    return StepStats(
        step_id=batch.step_id,
        num_decodes=num_decodes,
        num_prefill_tokens=num_prompt,
        num_waiting=batch.num_waiting,
        num_rows=num_decodes + num_prompt + num_drafted,
        context_len=context_len,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=sum(len(delta.token_ids) for delta in deltas),
        accepted_by_position=accepted,
        drafted_by_position=reached,
        depth=len(reached),
        k_by_reason=k_by_reason,
        outcomes=tuple(outcomes),
        num_caught_up=draft.num_caught_up,
        ended=tuple(ended),
        accepted_per_finished=tuple(accepted_means),
        schedule_s=schedule_s,
        draft_s=draft.draft_s,
        handoff_s=draft.handoff_s,
        verify_s=verdict.verify_s,
        sample_s=verdict.sample_s,
        step_s=step_s,
    )


def _by_position(draft: Draft, verdict: Verdict) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafts accepted and reached at each depth, up to the deepest draft.

    A depth after a rejection is not reached and counts in neither.
    """
    width = max((_num_levels(row) for row in draft.rows), default=0)
    accepted, reached = [0] * width, [0] * width
    for drafted, row in zip(draft.rows, verdict.rows, strict=True):
        for j in range(_num_reached(drafted, row)):
            reached[j] += 1
            accepted[j] += j < row.num_accepted
    return tuple(accepted), tuple(reached)


def _num_levels(drafted: DraftRow) -> int:
    return 1 + max(depths(drafted.parents)) if drafted.parents else drafted.num_tokens


def _num_reached(drafted: DraftRow, row: RowVerdict) -> int:
    """Depths at which the target has verified a draft token."""
    if not drafted.parents:
        return min(row.num_accepted + 1, drafted.num_tokens)
    return row.num_accepted + (row.last == "recovered")


def _outcome(span: Span, drafted: DraftRow, row: RowVerdict) -> RowOutcome:
    request = span.request
    confidences = drafted.confidences or row.confidences
    return RowOutcome(
        request.key,
        num_drafted=drafted.num_tokens,
        num_accepted=row.num_accepted,
        num_tokens=len(request.tokens),
        workload=request.submit.sampling.workload,
        source=drafted.source,
        match_len=drafted.match_len,
        adapter=request.adapter_name,
        num_asked=span.k if span.exit_threshold > 0 and confidences else 0,
        confidences=confidences,
        parents=drafted.parents,
        path=row.path,
    )


class RowOutcome(Struct, frozen=True, gc=False):
    """The verified draft of one request in one step."""

    key: int
    """The request's key."""
    num_drafted: int
    """Draft tokens verified, at least one."""
    num_accepted: int
    """Draft tokens accepted."""
    num_tokens: int
    """Tokens of the request after the step, including the prompt."""
    workload: WorkloadClass = "greedy"
    """The request's workload class."""
    num_asked: int = 0
    """Draft tokens asked for, if an early-exit threshold could shorten the draft; else 0."""
    confidences: tuple[float, ...] = ()
    """The draft's largest probability at each drafted position; empty for methods without probabilities."""
    source: DraftSource = "method"
    """What drafted the tokens."""
    match_len: int = 0
    """Length in tokens of the match that prompt lookup found, counted up to MAX_MATCH_LEN."""
    adapter: str = ""
    """Name of the request's adapter; empty for the base model."""
    parents: tuple[int, ...] = ()
    """Parent of each drafted token; empty for a chain."""
    path: tuple[int, ...] = ()
    """Accepted nodes of a draft with branches; empty for a chain, whose first `num_accepted` tokens are accepted."""

    @property
    def num_levels(self) -> int:
        """Draft tokens on the longest path."""
        return 1 + max(depths(self.parents)) if self.parents else self.num_drafted

    @property
    def left_first_path(self) -> bool:
        """Whether the accepted path goes through a token that is not the first one tried after its parent."""
        if not self.parents:
            return False
        first_children = {parent: node for node, parent in reversed(list(enumerate(self.parents)))}
        return any(first_children[self.parents[node]] != node for node in self.path)

    @property
    def reached_nodes(self) -> Sequence[int]:
        """Places of the draft that count as reached: the first, and those right after an accepted one. In a chain these
        are the tokens that the target has verified after accepted ones."""
        if not self.parents:
            return range(min(self.num_accepted + 1, self.num_drafted))
        return (0, *(node + 1 for node in self.path if node + 1 < self.num_drafted))

    @property
    def accepted_nodes(self) -> Sequence[int]:
        """Indices of the accepted tokens, ascending."""
        return self.path if self.parents else range(self.num_accepted)


class StepStats(Struct, frozen=True, kw_only=True, gc=False):
    """Counts and durations of one step. Filled by the engine, read by the pacer, the controller and the metrics."""

    step_id: int
    """Number of the step, from 1."""
    num_decodes: int
    """Spans of one committed token."""
    num_prefill_tokens: int
    """Committed tokens of all other spans."""
    num_waiting: int
    """Requests in the waiting queue."""
    num_rows: int
    """Rows of the target's forward: committed and draft tokens."""
    context_len: int
    """Sum over spans of the tokens that were in the KV cache before the step."""
    num_drafted: int
    """Draft tokens verified."""
    num_accepted: int
    """Draft tokens accepted."""
    num_emitted: int
    """Tokens emitted to requests."""
    accepted_by_position: tuple[int, ...]
    """[depth] Drafts of which a token at this position was accepted."""
    drafted_by_position: tuple[int, ...]
    """[depth] Drafts whose token at this position was reached: the one before it was accepted."""
    depth: int
    """Length of the longest draft; in a tree, of its longest path."""
    k_by_reason: dict[str, int]
    """Number of spans that sample, by the reason of their K."""
    outcomes: tuple[RowOutcome, ...]
    """One per request with a draft."""
    num_caught_up: int
    """Committed tokens that the draft read before it drafted."""
    ended: tuple[int, ...]
    """Keys of requests that finished in this step or were aborted since the previous one."""
    accepted_per_finished: tuple[float, ...]
    """Mean number of accepted tokens per draft, of each request that finished in this step and had a draft."""
    schedule_s: float
    """Seconds of scheduling."""
    draft_s: float
    """Seconds of computation in the draft; 0 if no draft was asked for."""
    handoff_s: float
    """Seconds of transfer between target and draft."""
    verify_s: float
    """Seconds of the target's forward."""
    sample_s: float
    """Seconds of logits processing, sampling and acceptance."""
    step_s: float
    """Seconds of the whole step."""
