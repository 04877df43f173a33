"""Drafters of random trees over a toy vocabulary: every shape, tokens drawn without replacement from q or made up, also
merged from several proposers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from fakes import ToyModel
from trees import path_to, random_parents

from engine.core.drafter import empty_rows
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict
from engine.proposals.merge import MergedTree, Proposal, merge
from engine.sampling.distribution import warp
from engine.tree import branches, chain_parents, children_of

Bias = Literal["none", "drops_repeats", "fills_up"]


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


class RandomMerges(RandomTrees):
    """For every request in every step, a random tree drawn from q and one or two made-up ones, merged under its k. The
    tokens of the made-up ones are mostly likely ones and are mostly tried first, so that much is shared.

    Args:
        model: gives q.
        seed: of the shapes, the draws and the expectations.
        bias: a rule that must not be used. `drops_repeats` does not try a drawn token again that was tried before;
            `fills_up` lets the drawn nodes that a full budget leaves out join where they are shared.
    """

    def __init__(self, model: ToyModel, seed: int, *, bias: Bias = "none") -> None:
        super().__init__(model, seed)
        self._bias = bias
        self.num_repeats = 0
        """Drawn tokens that were tried again."""

    def _row(self, span: Span) -> DraftRow:
        row = super()._row(span)
        parents = row.parents or chain_parents(len(row.token_ids))
        q_rows = [0] * len(parents)
        for nodes in children_of(parents):
            for node in nodes:
                q_rows[node] = nodes[0]
        drawn = row.probs is not None
        expected = self._expectations(len(parents), 0.0, 0.8)
        proposals = [Proposal(row.token_ids, parents, expected, tuple(q_rows) if drawn else ())]
        proposals += [self._made_up(span) for _ in range(self._rng.randint(1, 2))]
        self._rng.shuffle(proposals)
        tree = merge(proposals, span.k)
        if self._bias == "fills_up" and len(tree.token_ids) == span.k:
            more = merge(proposals, 99)
            kept = [trial for trial in more.trials if trial.node < span.k]  # Those of the tree, and shared ones after.
            tree = MergedTree(tree.token_ids, tree.parents, tuple(kept), ())
        trials = tree.trials
        repeated = [place for place, trial in enumerate(trials) if trial.node in {each.node for each in trials[:place]}]
        self.num_repeats += len(repeated)
        if self._bias == "drops_repeats":
            trials = tuple(trial for place, trial in enumerate(trials) if place not in repeated)
        self.num_forks += branches(tree.parents)
        return DraftRow(
            tree.token_ids,
            probs=row.probs,
            reason=span.reason,
            parents=tree.parents,
            trials=trials if drawn else (),
        )

    def _made_up(self, span: Span) -> Proposal:
        parents = random_parents(self._rng, self._rng.randint(1, span.k))
        tokens: list[int] = []
        shape: list[int] = []
        places = {-1: -1}
        taken: dict[int, set[int]] = {}
        for node, parent in enumerate(parents):
            if parent not in places:
                continue
            above = places[parent]
            path = [tokens[each] for each in path_to(shape, above)]
            scores = self._model.logits_after([*span.request.tokens, *path])
            scores = scores + self._draws.gumbel(size=len(scores)) * 0.3
            free = [token for token in np.argsort(-scores).tolist() if token not in taken.setdefault(above, set())]
            if free:
                places[node] = len(tokens)
                taken[above].add(free[0])
                tokens.append(free[0])
                shape.append(above)
        return Proposal(tuple(tokens), tuple(shape), self._expectations(len(tokens), 0.4, 1.0))

    def _expectations(self, number: int, low: float, high: float) -> tuple[float, ...]:
        return tuple(self._rng.uniform(low, high) for _ in range(number))
