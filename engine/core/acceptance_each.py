"""The acceptance rules of `engine.core.acceptance` on the host: one span after the other, in the order of the papers.

The slow twin of `accept_all`, and the faster one on a CPU: it stops at the first rejection, and the rows of one span
stay in the cache of the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.acceptance import SampledSpan, draw_seed, rows_of, target_choices
from engine.core.step import DraftRow
from engine.sampling.distribution import Purpose, draw, gumbel, uniform, warp
from engine.sampling.rejection import Outcome, after_rejection, residual


def accept_each(logits: torch.Tensor, spans: Sequence[SampledSpan], vocab: torch.Tensor | None) -> Outcome:
    """As `accept_all`, for drafts that the host has. It reads the device several times per span."""
    num_choices = sum(span.by_choice for span in spans)
    found: list[tuple[list[int], int]] = []
    if num_choices > 0:
        group = spans[:num_choices]
        choices = target_choices(rows_of(logits, group), group).tolist()
        for span in group:
            found.append(_follow_choices(span, choices))
            choices = choices[len(span.rows) :]
    if num_choices < len(spans):
        group = spans[num_choices:]
        probs = warp(rows_of(logits, group), [span.sampling for span in group for _ in span.rows])
        for span in group:
            found.append(_reject_one(probs[: len(span.rows)], span, vocab))
            probs = probs[len(span.rows) :]
    paths, last_tokens = zip(*found, strict=True)
    written = None
    if any(span.branches for span in spans):
        written = torch.full((len(spans), max(span.draft_row.num_tokens for span in spans)), -1, device=logits.device)
        for index, path in enumerate(paths):
            written[index, : len(path)] = torch.tensor(path, device=logits.device)
    num_accepted = torch.tensor([len(path) for path in paths], device=logits.device)
    return Outcome(num_accepted, torch.tensor(last_tokens, device=logits.device), written)


def _reject_one(target_probs: torch.Tensor, span: SampledSpan, vocab: torch.Tensor | None) -> tuple[list[int], int]:
    """The accepted nodes and the token after them, by rejection sampling.

    Args:
        target_probs: [k + 1, V] p.
        span: the span.
        vocab: target token ids of q's columns.
    """
    drafted, all_trials = span.draft_row.token_ids, span.trials
    path: list[int] = []
    while True:
        row = path[-1] + 1 if path else 0
        p, depth, trials = target_probs[row], len(path), all_trials[row]
        if not trials:
            return path, _draw(p, span, depth, Purpose.TOKEN)
        rest: torch.Tensor | None = None  # q of the drawn siblings
        tried: set[int] = set()
        for rank, trial in enumerate(trials):
            token = drafted[trial.node]
            if trial.q_row >= 0 and rest is None:
                rest = _draft_probs(span.draft_row, trial.q_row, vocab, p)
            q = rest if trial.q_row >= 0 and rest is not None else _one_hot(token, p)
            number = uniform(draw_seed(span, depth, Purpose.ACCEPT, rank))
            if trial.node not in tried and number * float(q[token]) < float(p[token]):
                path.append(trial.node)
                break
            tried.add(trial.node)
            if rank + 1 == len(trials):
                return path, _draw(residual(p.unsqueeze(0), q.unsqueeze(0))[0], span, depth, Purpose.RECOVER)
            after, q_after = after_rejection(p.unsqueeze(0), q.unsqueeze(0), torch.tensor([token], device=p.device))
            p, rest = after[0], q_after[0] if trial.q_row >= 0 else rest


def _follow_choices(span: SampledSpan, choices: Sequence[int]) -> tuple[list[int], int]:
    """The nodes whose tokens equal the target's choices, from the root position on, and the choice after them.

    Args:
        span: the span.
        choices: the target's token of each of its rows, and of those of later spans.
    """
    drafted, path = span.draft_row.token_ids, list[int]()
    if not span.branches:
        while len(path) < len(drafted) and drafted[len(path)] == choices[len(path)]:
            path.append(len(path))
        return path, choices[len(path)]
    children = span.children
    row = 0
    while (node := next((n for n in children[row] if drafted[n] == choices[row]), None)) is not None:
        path.append(node)
        row = node + 1
    return path, choices[row]


def _draft_probs(draft_row: DraftRow, j: int, vocab: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Row j of q over the target's vocabulary, [V] float32; None if the draft has no q."""
    if draft_row.probs is None:
        return None
    q = torch.zeros_like(like)
    if vocab is None:
        q[: draft_row.probs.shape[-1]] = draft_row.probs[j, : len(q)]
    else:
        q[vocab] = draft_row.probs[j]
    return q


def _one_hot(token: int, like: torch.Tensor) -> torch.Tensor:
    q = torch.zeros_like(like)
    q[token] = 1.0
    return q


def _draw(weights: torch.Tensor, span: SampledSpan, offset: int, purpose: Purpose) -> int:
    """One token from weights [V]."""
    noise = gumbel([draw_seed(span, offset, purpose)], torch.arange(len(weights), device=weights.device))
    return int(draw(weights.unsqueeze(0), noise))
