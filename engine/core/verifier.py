"""The verify phase: one target forward over committed and draft tokens, then acceptance of the drafts.

Owns the order of operations on the logits of a step: score the prompts, apply each request's logits processor, accept
or reject, score the emitted tokens, and copy the result to the host once. The forward is injected, so the same code
verifies with a sharded model and with a toy model of ten tokens. `engine.core.acceptance` holds the acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from engine.core.acceptance import AcceptanceKind, SampledSpan, accept_all, draft_table
from engine.core.acceptance_each import accept_each
from engine.core.packing import Forward, pack_step, path_moves, prompt_rows
from engine.core.step import Batch, DeviceDrafts, Draft, Features, RowVerdict, Span, Verdict
from engine.messages import EmittedKind, TokenLogprobs
from engine.sampling.logits_processor import BatchLogitsProcessor, LogitsProcessor
from engine.sampling.logprobs import Scores, score, token_logprobs
from engine.sampling.readback import HostClock, StepClock
from engine.sampling.rejection import Outcome
from engine.sampling.staging import to_device, to_host


class Verifier:
    """Phase three of the step.

    Args:
        forward: the target.
        block_size: tokens per KV block.
        acceptance: which implementation of the acceptance rules to use; the results are equal.
        clock: measures the forward and brings the results to the host; None for a target on a CPU.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        block_size: int,
        acceptance: AcceptanceKind = "auto",
        clock: StepClock | None = None,
    ) -> None:
        self._forward = forward
        self._block_size = block_size
        self._acceptance: AcceptanceKind = acceptance
        self._clock = clock or HostClock()
        self._moves: list[tuple[int, int]] = []  # of the paths accepted last, for the next forward

    def verify(self, batch: Batch, draft: Draft) -> Verdict:
        """Run the target once and accept or reject every draft token.

        Where an accepted path is not the first rows of its tree, its KV slots move at the beginning of the next
        forward, before anything is written. Whatever became of the request and its blocks by then: a block in the
        prefix cache gets its content before it is read, and one that has a new owner before the owner writes it.

        Raises:
            ShardDown: a target shard does not answer.
        """
        clock = self._clock
        clock.begin()
        forward_input = pack_step(batch, draft, self._block_size, self._moves)
        result = self._forward(forward_input)
        clock.forwarded()
        rows = accept_or_reject(
            result.require_logits(),
            batch.spans,
            draft,
            acceptance=self._acceptance,
            read=clock.read,
            most_likely=result.most_likely,
        )
        self._moves = path_moves(batch.spans, rows, self._block_size)
        features = Features(result.hidden, forward_input.q_lens) if result.hidden is not None else None
        times = clock.times()
        return Verdict(rows, verify_s=times.forward_s, sample_s=times.rest_s, features=features)


class _PromptRows(Struct, frozen=True, gc=False):
    """The logit rows that score the prompt of one span."""

    index: int
    """Index of the span in the batch."""
    rows: range
    tokens: tuple[int, ...]
    """The prompt tokens to score, one per row."""
    num_top: int


@torch.inference_mode()
def accept_or_reject(
    logits: torch.Tensor,
    spans: Sequence[Span],
    draft: Draft,
    *,
    acceptance: AcceptanceKind = "auto",
    read: Callable[[Sequence[torch.Tensor]], list[npt.NDArray[Any]]] = to_host,
    most_likely: torch.Tensor | None = None,
) -> tuple[RowVerdict, ...]:
    """Apply each request's logits processor and acceptance rule to its rows. The host waits for the device once.

    Args:
        logits: [R, V] float32, changed in place. For each span: the rows that score its prompt, then, if it samples,
            len(draft) + 1 rows.
        spans: the spans of the step.
        draft: the draft tokens, in the order of the spans.
        acceptance: which implementation of the acceptance rules to use.
        read: copies the results to the host; the only wait.
        most_likely: [R] int64 column of the largest logit of each row, if it has been found already.
    """
    prompts, sampled = _layout(spans, draft)
    branching = any(job.branches for job in sampled)
    reported = [place for place, job in enumerate(sampled) if _num_top(job) is not None]
    results: list[torch.Tensor] = []
    if prompts:
        results += _score_prompts(logits, prompts).tensors()
    if sampled:
        # The processors change the logits in place; log-probabilities are those of the model.
        unchanged = _gather(logits, [row for place in reported for row in sampled[place].rows]) if reported else None
        if _process(logits, sampled):
            most_likely = None  # It was that of the unchanged logits.
        if acceptance == "auto":
            acceptance = "each" if logits.device.type == "cpu" else "together"
        on_device = draft.on_device
        if acceptance == "each" and on_device is None:
            outcome = accept_each(logits, sampled, draft.vocab)
        else:
            outcome = accept_all(logits, sampled, draft.vocab, on_device, most_likely)
        if unchanged is not None:
            results += _score_emitted(unchanged, sampled, reported, outcome, on_device).tensors()
        if on_device is not None:
            emitted = outcome.emitted(draft_table(sampled, logits.device, on_device))
            results += [emitted, on_device.confidences]
        results += [] if outcome.path is None else [outcome.path]
        results += [outcome.num_accepted, outcome.last_token]
    return _verdicts(
        *(read(results), len(spans), prompts, sampled, reported),
        on_device=draft.on_device is not None,
        branching=branching,
    )


def _layout(spans: Sequence[Span], draft: Draft) -> tuple[list[_PromptRows], list[SampledSpan]]:
    """The logit rows of each span. Spans that are `by_choice` come first among those that sample."""
    prompts: list[_PromptRows] = []
    sampled: list[SampledSpan] = []
    first = 0
    for index, (span, draft_row) in enumerate(zip(spans, draft.rows, strict=True)):
        scored = prompt_rows(span)
        if scored:
            submit = span.request.submit
            tokens = submit.prompt[scored.start + 1 : scored.stop + 1]
            num_top = submit.sampling.num_prompt_logprobs or 0
            prompts.append(_PromptRows(index, range(first, first + len(scored)), tokens, num_top))
            first += len(scored)
        if span.samples:
            rows = range(first, first + draft_row.num_tokens + 1)
            sampled.append(SampledSpan(index, span, draft_row, rows, span.request.row_sampling))
            first = rows.stop
    return prompts, sorted(sampled, key=lambda job: not job.by_choice)


def _num_top(job: SampledSpan) -> int | None:
    return job.span.request.submit.sampling.num_logprobs


def _gather(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """A copy of these rows."""
    (index,) = to_device([np.array(rows, dtype=np.int64)], logits.device)
    return logits.index_select(0, index)


def _process(logits: torch.Tensor, sampled: Sequence[SampledSpan]) -> bool:
    """Apply penalties and grammars at every position, given that the draft tokens before it are accepted.

    Returns:
        Whether any request has such options.
    """
    has_options = False
    batch_processor = BatchLogitsProcessor()
    for job in sampled:
        logits_processor = job.span.request.logits_processor
        if logits_processor is None:
            continue
        has_options = True
        logits_processor.follow(job.span.request.tokens)
        batch_processor.add(job.rows.start, logits_processor)
        _process_children(batch_processor, logits_processor, job, job.children, 0)
    batch_processor.apply(logits)
    return has_options


def _process_children(
    batch_processor: BatchLogitsProcessor,
    logits_processor: LogitsProcessor,
    job: SampledSpan,
    children: Sequence[Sequence[int]],
    row: int,
) -> None:
    """Add the rows of all nodes below one, each with the state after its path.

    Args:
        logits_processor: after the path to `row`, where it is again at the end.
        row: counted from the first row of the span, as those of `children`.
    """
    num_tokens = logits_processor.num_tokens
    for node in children[row]:
        if logits_processor.push(job.draft_row.token_ids[node]):  # The host has these tokens.
            batch_processor.add(job.rows.start + 1 + node, logits_processor)
            _process_children(batch_processor, logits_processor, job, children, node + 1)
            logits_processor.rewind(num_tokens)
        # Else the token will be rejected, so no row after it is used.


def _score_prompts(logits: torch.Tensor, prompts: Sequence[_PromptRows]) -> Scores:
    """Score the prompt tokens, one row per token."""
    tokens = np.array([token for prompt in prompts for token in prompt.tokens], dtype=np.int64)
    rows = np.array([row for prompt in prompts for row in prompt.rows], dtype=np.int64)
    index, chosen = to_device([rows, tokens], logits.device)
    subset = logits if len(rows) == len(logits) else logits.index_select(0, index)
    return score(subset, chosen, num_top=max(prompt.num_top for prompt in prompts))


def _score_emitted(
    logits: torch.Tensor,
    sampled: Sequence[SampledSpan],
    reported: Sequence[int],
    outcome: Outcome,
    on_device: DeviceDrafts | None,
) -> Scores:
    """Score the emitted tokens of the reported spans, one row per draft token and one more.

    Args:
        logits: the rows of the reported spans, one span after the other, as the model computed them.
        sampled: all spans that yield tokens.
        reported: indices into `sampled`.
        outcome: of all spans in `sampled`.
        on_device: draft tokens that only the device has.
    """
    table = draft_table(sampled, logits.device, on_device)
    emitted, rows = outcome.emitted(table), outcome.rows(table)
    places = np.array([place for place in reported for _ in sampled[place].rows], dtype=np.int64)
    offsets = np.array([j for place in reported for j in range(len(sampled[place].rows))], dtype=np.int64)
    kept = np.cumsum([len(sampled[place].rows) for place in reported])  # rows of the reported spans before the next
    firsts = np.repeat(np.concatenate(([0], kept[:-1])), [len(sampled[place].rows) for place in reported])
    place_index, offset_index, first_index = to_device([places, offsets, firsts], logits.device)
    num_top = max(_num_top(sampled[place]) or 0 for place in reported)
    if outcome.path is not None:
        logits = logits.index_select(0, rows[place_index, offset_index] - rows[place_index, 0] + first_index)
    return score(logits, emitted[place_index, offset_index], num_top=num_top)


def _verdicts(
    results: list[np.ndarray],
    num_spans: int,
    prompts: Sequence[_PromptRows],
    sampled: Sequence[SampledSpan],
    reported: Sequence[int],
    *,
    on_device: bool,
    branching: bool,
) -> tuple[RowVerdict, ...]:
    """The verdict of each span, from the arrays that `accept_or_reject` has copied to the host.

    Args:
        on_device: whether emitted tokens and confidences are among them.
        branching: whether paths are among them.
    """
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    if prompts:
        chosen, values, ids = results[:3]
        logprobs = token_logprobs(chosen, values, ids, [prompt.num_top for prompt in prompts for _ in prompt.rows])
        for prompt in prompts:
            prompt_logprobs[prompt.index] = tuple(logprobs[: len(prompt.rows)])
            logprobs = logprobs[len(prompt.rows) :]
    verdicts = [RowVerdict(prompt_logprobs=prompt_logprobs.get(index, ())) for index in range(num_spans)]
    if not sampled:
        return tuple(verdicts)
    last_tokens, num_accepted = results.pop().tolist(), results.pop().tolist()
    paths = results.pop().tolist() if branching else None
    confidences, emitted = (results.pop(), results.pop()) if on_device else (None, None)
    emitted_logprobs: dict[int, list[TokenLogprobs]] = {}
    if reported:
        tops = [_num_top(sampled[place]) or 0 for place in reported for _ in sampled[place].rows]
        chosen, values, ids = results[-3:]
        logprobs = token_logprobs(chosen, values, ids, tops)
        for place in reported:
            emitted_logprobs[place] = logprobs[: num_accepted[place] + 1]
            logprobs = logprobs[len(sampled[place].rows) :]
    for place, (job, number, last_token) in enumerate(zip(sampled, num_accepted, last_tokens, strict=True)):
        drafted = job.draft_row
        path = tuple(paths[place][:number]) if paths is not None and job.branches else ()
        accepted = tuple(drafted.token_ids[node] for node in path) if path else drafted.token_ids[:number]
        certainties: tuple[float, ...] = ()
        if drafted.num_on_device and emitted is not None and confidences is not None:
            accepted = tuple(emitted[place][:number].tolist())
            certainties = tuple(confidences[drafted.device_row][: drafted.num_on_device].tolist())
        verdicts[job.index] = RowVerdict(
            token_ids=(*accepted, last_token),
            num_accepted=number,
            path=path,
            last=_last_kind(job, path, number),
            logprobs=tuple(emitted_logprobs.get(place, ())),
            prompt_logprobs=prompt_logprobs.get(job.index, ()),
            confidences=certainties,
        )
    return tuple(verdicts)


def _last_kind(job: SampledSpan, path: Sequence[int], num_accepted: int) -> EmittedKind:
    """Origin of the last emitted token."""
    if job.draft_row.num_tokens == 0:
        return "plain"
    if not job.branches:
        return "bonus" if num_accepted == job.draft_row.num_tokens else "recovered"
    return "recovered" if job.children[path[-1] + 1 if path else 0] else "bonus"
