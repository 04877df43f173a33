"""A drafter of random trees over a toy vocabulary: every shape, tokens drawn without replacement from q or made up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from fakes import ToyModel
from trees import path_to, random_parents

from engine.core.drafter import empty_rows
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict
from engine.sampling.distribution import warp
from engine.tree import branches


class RandomTrees:
    """A new random tree for every request in every step.

    Args:
        model: gives q; columns beyond its own are never drafted.
        seed: of the shapes and the draws.
        certain: whether tokens are made up, so that the draft has no q.
        drops_unlikely: whether a drawn token that q finds unlikely is dropped with all nodes below it. Biased.
    """

    def __init__(self, model: ToyModel, seed: int, *, certain: bool = False, drops_unlikely: bool = False) -> None:
        self._model = model
        self._rng = random.Random(seed)
        self._draws = np.random.default_rng(seed)
        self._certain = certain
        self._drops_unlikely = drops_unlikely
        self.num_forks = 0
        """Drafts that had branches."""

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for index, span in enumerate(batch.spans):
            if span.k > 0:
                rows[index] = self._row(span)
        return Draft(tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        del batch, verdict

    def forget(self, keys: Sequence[int]) -> None:
        del keys

    def _row(self, span: Span) -> DraftRow:
        by_choice = span.request.row_sampling.greedy or span.request.row_sampling.coupled
        shape = random_parents(self._rng, span.k)
        kept: dict[int, int] = {-1: -1}  # node of the shape -> node of the tree
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[torch.Tensor] = []
        left: dict[int, np.ndarray] = {}  # parent in the tree -> q without the tokens of its children
        for node, wanted in enumerate(shape):
            if wanted not in kept:
                continue
            parent = kept[wanted]
            is_first = parent not in left
            if is_first:
                left[parent] = self._q(span, [tokens[each] for each in path_to(parents, parent)])
            rest = left[parent]
            if not rest.any():
                continue  # Depends on q only.
            token = int(self._draws.choice(len(rest), p=rest / rest.sum()))
            q_row = torch.tensor(rest, dtype=torch.float32) if is_first else torch.full((len(rest),), float("nan"))
            unlikely = rest[token] / rest.sum() < 0.3
            rest = rest.copy()
            rest[token] = 0.0
            left[parent] = rest
            if self._drops_unlikely and unlikely:
                if is_first:
                    del left[parent]
                continue
            kept[node] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            probs.append(q_row)
        has_branches = branches(parents)
        self.num_forks += has_branches
        has_q = bool(tokens) and not by_choice and not self._certain
        return DraftRow(
            tuple(tokens),
            probs=torch.stack(probs) if has_q else None,
            reason=span.reason,
            parents=tuple(parents) if has_branches else (),
        )

    def _q(self, span: Span, path: Sequence[int]) -> np.ndarray:
        logits = torch.tensor(self._model.logits_after([*span.request.tokens, *path])).unsqueeze(0)
        sampling = span.request.row_sampling
        if self._certain or sampling.greedy:
            return np.ones(logits.shape[1])
        return warp(logits, [sampling])[0].double().numpy()
