"""How often the target accepted what each proposer proposed: the expectations that order a merged tree.

Owns counts of verified nodes by workload class, and the estimates made from them. There are three estimates.

    lookup    the share of accepted nodes by length of the match, role among the siblings and depth
    model     the share of accepted drawn groups by depth, over what the draft's confidences promised: a factor
    places    the share of the model's first, second, ... node that were accepted: how many to ask it for

A node counts where its parent was accepted and it was part of the tree. Counts are decayed, and start from a prior that
counts as a few observations (the mean of a Beta prior). They hold earlier steps only, so an order that follows from
them depends on no token of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.pacing import NUM_MATCH_CLASSES, match_class
from engine.lookup.continuations import Expected, Role
from engine.messages import WorkloadClass

DECAY = 0.998
"""Decay of a count per observation. The counts remember about five hundred observations."""
PRIOR_STRENGTH = 4.0
"""Number of observations that a prior counts as."""
MAX_DEPTH = 8
"""Depths that are told apart; deeper ones count as the last of them."""
HIGHEST = 0.98
"""Largest expectation of one node."""
SHARED = NUM_MATCH_CLASSES
"""Class of matches in the texts of other requests."""

_LOOKUP_PRIORS = ((0.5, 0.65, 0.7), (0.6, 0.7, 0.75), (0.75, 0.8), (0.85,), (0.5, 0.65, 0.7))
_ROLE_PRIORS: dict[Role, float] = {"alone": 1.0, "first": 0.75, "other": 0.25}
_PLACE_PRIOR, _PLACE_RATIO = 0.6, 0.8


class _Share:
    """A decayed share with a prior.

    Args:
        prior: mean before the first observation.
    """

    __slots__ = ("_accepted", "_expected", "value")

    def __init__(self, prior: float) -> None:
        self._accepted, self._expected = PRIOR_STRENGTH * prior, PRIOR_STRENGTH
        self.value = prior
        """The estimate."""

    def count(self, *, accepted: bool, expected: float = 1.0) -> None:
        """Add an observation.

        Args:
            accepted: the outcome.
            expected: the outcome's expectation, if the share is relative to one.
        """
        self._accepted = DECAY * self._accepted + accepted
        self._expected = DECAY * self._expected + expected
        self.value = self._accepted / self._expected


class SourceRates:
    """The expectations of one engine."""

    def __init__(self) -> None:
        self._lookup: dict[tuple[WorkloadClass, int, Role, int], _Share] = {}
        self._model: dict[tuple[WorkloadClass, int], _Share] = {}
        self._places: dict[tuple[WorkloadClass, int], _Share] = {}

    def of_lookup(self, workload: WorkloadClass, match_len: int, *, is_shared: bool) -> Expected:
        """What to expect of continuations, by role and depth."""
        kind = SHARED if is_shared else match_class(match_len)
        return lambda role, depth: min(HIGHEST, self._lookup_share(workload, kind, role, depth).value)

    def of_model(self, workload: WorkloadClass, confidence: float, rank: int, depth: int, *, drawn: bool) -> float:
        """What to expect of a node of the draft model.

        Args:
            workload: class of the request.
            confidence: the draft's probability of the node's token, or of its likeliest token where `drawn`.
            rank: place among its siblings.
            depth: ancestors of the node.
            drawn: whether the rejection rule decides, where siblings are drawn without replacement. A later one then
                counts as tried with the same chance after the rejection of those before.
        """
        one = min(HIGHEST, max(0.0, confidence * self._model_share(workload, depth).value))
        return one * (1 - one) ** rank if drawn else one

    def of_places(self, workload: WorkloadClass, k: int) -> list[float]:
        """[k] probability that the first, second, ... node of the model's own tree is accepted."""
        return [self._place_share(workload, place).value for place in range(k)]

    def saw_lookup(
        self, workload: WorkloadClass, match_len: int, role: Role, depth: int, *, is_shared: bool, accepted: bool
    ) -> None:
        """Count a node of a lookup whose parent was accepted."""
        kind = SHARED if is_shared else match_class(match_len)
        self._lookup_share(workload, kind, role, depth).count(accepted=accepted)

    def saw_model(self, workload: WorkloadClass, depth: int, *, expected: float, accepted: bool) -> None:
        """Count the model's nodes below an accepted node.

        Args:
            expected: the sum of their confidences, at most 1.
            accepted: whether one of them was accepted.
        """
        if expected > 0:
            self._model_share(workload, depth).count(accepted=accepted, expected=expected)

    def saw_place(self, workload: WorkloadClass, place: int, *, accepted: bool) -> None:
        """Count a node of the model by its place in the model's own tree."""
        self._place_share(workload, place).count(accepted=accepted)

    def _lookup_share(self, workload: WorkloadClass, kind: int, role: Role, depth: int) -> _Share:
        key = (workload, kind, role, min(depth, MAX_DEPTH - 1))
        share = self._lookup.get(key)
        if share is None:
            priors = _LOOKUP_PRIORS[kind]
            share = self._lookup[key] = _Share(priors[min(depth, len(priors) - 1)] * _ROLE_PRIORS[role])
        return share

    def _model_share(self, workload: WorkloadClass, depth: int) -> _Share:
        key = (workload, min(depth, MAX_DEPTH - 1))
        share = self._model.get(key)
        if share is None:
            share = self._model[key] = _Share(1.0)
        return share

    def _place_share(self, workload: WorkloadClass, place: int) -> _Share:
        share = self._places.get((workload, place))
        if share is None:
            share = self._places[workload, place] = _Share(_PLACE_PRIOR * _PLACE_RATIO**place)
        return share


def num_to_ask(certain: Sequence[float], of_places: Sequence[float], price: float = 0.0) -> int:
    """How many nodes to ask the model for, beside what lookup has.

    Nodes of the model are worth what they add to the expected acceptances of the likeliest len(of_places) nodes of
    both, less their price.

    Args:
        certain: cumulative expectation of each node of the lookups, in any order.
        of_places: the same of the model's nodes, by place; its length is the budget.
        price: of one node of the model, in tokens.
    """
    budget = len(of_places)
    best, found = sum(sorted(certain, reverse=True)[:budget]), 0
    for number in range(1, budget + 1):
        likeliest = sorted([*certain, *of_places[:number]], reverse=True)[:budget]
        worth = sum(likeliest) - number * price
        if worth > best + 1e-9:
            best, found = worth, number
    return found
