"""Acceptance offline: chains drafted at every position of the target's own answers, compared with what it wrote.

Owns the walk of verify steps over an answer and the means by category. A chain is right as long as its best tokens are
the target's; as in serving, the next root is the bonus token. Knows a draft only by `unroll`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill.data import Batch, Shard, collate, shard_paths
from distill.losses import overlap, soft_targets
from distill.losses import Objective
from distill.trainer import Draft


@dataclass(frozen=True)
class Acceptance:
    """What a draft would give on a set of answers."""

    num_answers: int
    first: float
    """Greedy: chance that a verify step accepts its first draft token."""
    per_position: tuple[float, ...]
    """Greedy: chance that position i is accepted, given that i - 1 was, over verify steps."""
    tokens_per_step: float
    """Greedy: emitted tokens per verify step, mean over answers."""
    everywhere: float
    """Greedy: chance that the first draft token is right, over all positions rather than roots of verify steps."""
    sampled: tuple[float, ...]
    """At `temperature`: mean overlap of draft and target laws at chain positions 1..K."""


@torch.inference_mode()
def answer_hits(draft: Draft, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """hits [K, T] bool and overlaps [K, T] float for the one row of `batch`; column t is the chain after root t."""
    length = batch.tokens.shape[1]
    hits, overlaps = torch.zeros(k, length, dtype=torch.bool), torch.zeros(k, length)
    for step, hidden in enumerate(draft.unroll(batch, k)):
        logits = draft.head(hidden[0])
        ids = batch.top_ids[0, step + 1 :]
        width = len(ids)
        hits[step, :width] = draft.vocabulary.draft_vocab[logits.argmax(-1)] == ids[:, 0]
        rows, present = soft_targets(ids, batch.top_logprobs[0, step + 1 :], draft.vocabulary.to_draft, Objective(1.0, 0.0))
        overlaps[step, :width] = overlap(logits, rows, batch.top_logprobs[0, step + 1 :], present > 0, temperature)
    return hits, overlaps


def walk(hits: np.ndarray, first_root: int, last_root: int) -> tuple[list[int], int]:
    """Verify steps from `first_root`: accepted lengths, and tokens emitted up to `last_root`."""
    root, accepted_lens = first_root, []
    while root < last_root:
        wrong = np.flatnonzero(~hits[:, root])
        accepted = int(wrong[0]) if len(wrong) else hits.shape[0]
        accepted = min(accepted, last_root - root)
        accepted_lens.append(accepted)
        root += accepted + 1
    return accepted_lens, root - first_root


def evaluate(
    draft: Draft, shards: Sequence[Path], *, k: int = 5, temperature: float = 0.8, limit: int | None = None
) -> dict[str, Acceptance]:
    """Acceptance by kind of document, and under `all`.

    Greedy figures use documents answered greedily (kind without a `@`), sampled ones those whose kind ends in `@T`;
    where a kind has no sampled documents its greedy ones serve.
    """
    greedy: dict[str, list[tuple[np.ndarray, np.ndarray, int, int]]] = defaultdict(list)
    sampled: dict[str, list[np.ndarray]] = defaultdict(list)
    for kind, batch, begin in documents(shards, limit):
        hits, overlaps = (value.numpy() for value in answer_hits(draft, batch, k, temperature))
        last = batch.tokens.shape[1] - 1
        base = kind.split("@")[0]
        for name in (base, "all"):
            if "@" in kind:
                sampled[name].append(overlaps[:, begin : max(last - k, begin + 1)].mean(1))
            else:
                greedy[name].append((hits, overlaps, begin, last))
    return {name: _acceptance(rows, sampled.get(name, []), k) for name, rows in greedy.items()}


def documents(shards: Sequence[Path], limit: int | None = None) -> Iterable[tuple[str, Batch, int]]:
    """(kind, one-row batch, first root) of every document; the first root is the last prompt token but one."""
    count = 0
    for path in shards:
        shard = Shard.open(path)
        for kind, start, stop in zip(shard.meta["kinds"], shard.doc_starts[:-1], shard.doc_starts[1:], strict=True):
            written = np.flatnonzero(shard.written[start:stop])
            if not len(written) or stop - start < 8:
                continue
            yield kind, collate([(shard, int(start), int(stop))], int(stop - start), 0.0), max(int(written[0]) - 1, 0)
            count += 1
            if limit is not None and count >= limit:
                return


def eval_shards(folder: Path) -> list[Path]:
    """Finished shards of an evaluation folder."""
    return shard_paths([folder])


def _acceptance(rows: list[tuple[np.ndarray, np.ndarray, int, int]], sampled: list[np.ndarray], k: int) -> Acceptance:
    reached, accepted_at, per_answer, right, positions = np.zeros(k), np.zeros(k), [], 0.0, 0
    for hits, _, begin, last in rows:
        lengths, emitted = walk(hits, begin, last)
        if not lengths:
            continue
        per_answer.append(emitted / len(lengths))
        for length in lengths:
            reached[: length + 1] += 1
            accepted_at[:length] += 1
        right += float(hits[0, begin:last].sum())
        positions += last - begin
    overlaps = sampled or [o[:, begin : max(last - k, begin + 1)].mean(1) for _, o, begin, last in rows]
    chance = accepted_at / np.maximum(reached, 1)
    return Acceptance(
        num_answers=len(per_answer), first=float(chance[0]), per_position=tuple(map(float, chance)),
        tokens_per_step=float(np.mean(per_answer)), everywhere=right / max(positions, 1),
        sampled=tuple(map(float, np.mean(overlaps, axis=0))),
    )
