"""Offline acceptance: chains drafted at every position of the target's responses, compared with the responses.

Owns the walk of verify steps over a response and the means by category. A chain is accepted up to its first token that
differs from the target's; as in serving, the next root is the bonus token. Knows a draft only by `unroll`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from distill.data.shards import Batch, Shard, collate
from distill.settings import Objective
from distill.training.losses import overlap, soft_targets
from distill.training.trainer import Draft

Bits = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Acceptance:
    """Figures of a draft on a set of responses."""

    num_responses: int
    first: float
    """Probability that a verify step accepts its first draft token, greedy."""
    per_position: tuple[float, ...]
    """Probability over verify steps that position i is accepted, given that i - 1 was, greedy."""
    tokens_per_step: float
    """Emitted tokens per verify step, greedy; mean over responses."""
    everywhere: float
    """Probability that the first draft token is right, greedy, over all positions, not only roots of verify steps."""
    sampled: tuple[float, ...]
    """Mean overlap of the draft's and the target's distribution at chain positions 1..K, at `temperature`."""


@torch.inference_mode()
def answer_hits(draft: Draft, batch: Batch, first_root: int, k: int, temperature: float) -> tuple[Bits, Reals]:
    """Hits and overlaps [K, roots] of the single row of `batch`; column i is the chain of root first_root + i."""
    roots = batch.tokens.shape[1] - 1 - first_root
    hits, overlaps = np.zeros((k, roots), np.bool_), np.zeros((k, roots), np.float32)
    for step, hidden in enumerate(draft.unroll(batch, k, first_root).hidden):
        logits = draft.head(hidden[0])
        at = slice(step + 1 + first_root, None)
        ids, logprobs = batch.top_ids[0, at], batch.top_logprobs[0, at]
        right = draft.vocabulary.draft_vocab[logits.argmax(-1)] == ids[:, 0]
        rows, present = soft_targets(ids, logprobs, draft.vocabulary.to_draft, Objective(1.0, 0.0))
        hits[step, : len(ids)] = right.numpy()
        overlaps[step, : len(ids)] = overlap(logits, rows, logprobs, present > 0, temperature).numpy()
    return hits, overlaps


def walk(hits: Bits) -> tuple[list[int], int]:
    """Accepted lengths of the verify steps over a response, and emitted tokens; hits is [K, roots]."""
    root, last, accepted_lens = 0, hits.shape[1], []
    while root < last:
        wrong = np.flatnonzero(~hits[:, root])
        accepted = int(wrong[0]) if len(wrong) else hits.shape[0]
        accepted_lens.append(accepted)
        root += accepted + 1
    return accepted_lens, sum(accepted_lens) + len(accepted_lens)


def evaluate(
    draft: Draft, shards: Sequence[Path], *, k: int = 5, temperature: float = 0.8, every: int = 1
) -> dict[str, Acceptance]:
    """Acceptance by kind of document, and over all kinds under `all`. Only every `every`-th document is used.

    Greedy figures use greedy responses. Sampled figures use the kinds that end in `@sampled`, which hold responses
    sampled at `temperature`; where a kind has none, its greedy responses are used.
    """
    greedy: dict[str, list[tuple[Bits, Reals]]] = defaultdict(list)
    sampled: dict[str, list[Reals]] = defaultdict(list)
    for kind, batch, first_root in documents(shards, every):
        hits, overlaps = answer_hits(draft, batch, first_root, k, temperature)
        base, _, how = kind.partition("@")
        for name in (base, "all"):
            if how:
                sampled[name].append(overlaps)
            else:
                greedy[name].append((hits, overlaps))
    return {
        name: _acceptance([h for h, _ in rows], sampled.get(name) or [o for _, o in rows], k)
        for name, rows in sorted(greedy.items())
    }


def documents(shards: Sequence[Path], every: int = 1) -> Iterable[tuple[str, Batch, int]]:
    """(kind, one-row batch, first root) of each `every`-th document.

    The first root is the last prompt token: the first response token comes from prefill, so drafting starts after it.
    """
    count = 0
    for path in shards:
        shard = Shard.open(path)
        for kind, start, stop in zip(shard.meta["kinds"], shard.doc_starts[:-1], shard.doc_starts[1:], strict=True):
            count += 1
            written = np.flatnonzero(shard.written[start:stop])
            if count % every or not len(written) or stop - start - written[0] < 3:
                continue
            yield kind, collate([(shard, int(start), int(stop))], int(stop - start), 0.0), max(int(written[0]) - 1, 0)


def _acceptance(hits: list[Bits], overlaps: list[Reals], k: int) -> Acceptance:
    reached, accepted, per_answer = np.zeros(k), np.zeros(k), []
    for chains in hits:
        lengths, emitted = walk(chains)
        per_answer.append(emitted / len(lengths))
        for length in lengths:
            reached[: length + 1] += 1
            accepted[:length] += 1
    everywhere = np.concatenate([chains[0] for chains in hits])
    means = [rows[:, : max(rows.shape[1] - k, 1)].mean(1) for rows in overlaps]
    return Acceptance(
        num_responses=len(per_answer),
        first=float(accepted[0] / max(reached[0], 1)),
        per_position=tuple(map(float, accepted / np.maximum(reached, 1))),
        tokens_per_step=float(np.mean(per_answer)),
        everywhere=float(everywhere.mean()),
        sampled=tuple(map(float, np.mean(means, axis=0))),
    )
