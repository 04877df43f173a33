"""Drafting trees: prompt lookup and the draft model propose, and one tree per request is verified.

Owns the order of a step: look up, decide how many nodes to ask the model for, merge, and count what was accepted after
the verification. Knows neither the model nor how texts are searched; `engine.proposals.merge` says why the output stays
exact.

The model is asked for as many nodes as are expected to be among the likeliest of the budget. Where a long match fills
the budget, it is not asked, and the step costs no draft forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from engine.core.drafter import Drafter, empty_rows
from engine.core.pacing import match_class
from engine.core.step import Batch, Draft, DraftRow, DraftSource, RowVerdict, Span, Verdict
from engine.lookup.ngram import Lookup, Match
from engine.messages import WorkloadClass
from engine.proposals.merge import MergedTree, Proposal, merge
from engine.proposals.rates import SourceRates, num_to_ask
from engine.tree import branches, chain_parents, children_of, depths

EXPLORE_DRAFTS = 32
"""One draft in so many keeps nodes that do not seem to be worth their rows, so that expectations stay current."""


class _Merged(Struct, frozen=True, gc=False):
    """What went into the tree of one span."""

    matches: Sequence[Match]
    match_places: Sequence[Sequence[int]]
    """Of each match, the node of the tree that each of its nodes became; -1 for none."""
    model: DraftRow | None
    """The model's own draft; None where it has none."""
    model_places: Sequence[int]
    """The same of the model's nodes."""


class MergedDrafter:
    """One tree per request, of the continuations that lookup finds and of the model's own.

    Args:
        lookup: finds continuations; None leaves it out.
        model: drafts with a model, a chain or a tree per request; None leaves it out.
        rates: expectations of both; new ones when left out.
    """

    def __init__(self, lookup: Lookup | None, model: Drafter | None, *, rates: SourceRates | None = None) -> None:
        self._lookup = lookup
        self._model = model
        self.rates = rates or SourceRates()
        """What both are expected to yield for the base model."""
        self._adapter_rates: dict[str, SourceRates] = {}  # by name; adapters share nothing
        self._num_drafted = 0
        self._merged: dict[int, _Merged] = {}  # of the step that is being verified, by index of the span

    def draft(self, batch: Batch) -> Draft:
        self._merged.clear()
        found = [self._find(span) for span in batch.spans]
        if self._model is None:
            draft = Draft(tuple(empty_rows(batch)))
        else:
            asked = [
                span if not matches or span.k == 0 else replace(span, k=self._num_to_ask(span, matches))
                for span, matches in zip(batch.spans, found, strict=True)
            ]
            draft = self._model.draft(replace(batch, spans=tuple(asked)))
        rows = [
            self._row(index, span, matches, row)
            for index, (span, matches, row) in enumerate(zip(batch.spans, found, draft.rows, strict=True))
        ]
        return replace(draft, rows=tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        for index, merged in self._merged.items():
            self._count(batch.spans[index], merged, verdict.rows[index])
        self._merged.clear()
        if self._lookup is not None:
            self._lookup.committed(batch)
        if self._model is not None:
            self._model.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        if self._lookup is not None:
            self._lookup.forget(keys)
        if self._model is not None:
            self._model.forget(keys)

    def _rates_of(self, span: Span) -> SourceRates:
        name = span.request.adapter_name
        return self._adapter_rates.setdefault(name, SourceRates()) if name else self.rates

    def _find(self, span: Span) -> list[Match]:
        """The continuations that lookup finds for a span, none where it must not draft."""
        most = max(span.k, span.max_lookup_k)
        if self._lookup is None or most == 0:
            return []
        workload, rates = span.request.submit.sampling.workload, self._rates_of(span)
        return self._lookup.continuations(
            span.request,
            most,
            lambda match_len, is_shared: rates.of_lookup(workload, match_len, is_shared=is_shared),
        )

    def _budget(self, span: Span, matches: Sequence[Match]) -> int:
        """Nodes of the tree: what the pace gives the model, or more where it gives more to the longest match."""
        if span.k_by_match is None or not matches:
            return span.k
        return max(span.k, *(span.k_by_match[match_class(match.match_len)] for match in matches))

    def _num_to_ask(self, span: Span, matches: Sequence[Match]) -> int:
        certain = [reach for match in matches for reach in _cumulative(match)]
        budget = self._budget(span, matches)
        of_places = self._rates_of(span).of_places(span.request.submit.sampling.workload, budget)
        return min(span.k, num_to_ask(certain, of_places, span.node_price))

    def _row(self, index: int, span: Span, matches: Sequence[Match], drafted: DraftRow) -> DraftRow:
        """The draft of one span. `drafted` is the model's own draft, or the empty row of a span without one."""
        if drafted.num_on_device:
            return drafted  # The host does not know its tokens, so nothing can be merged with them.
        model = drafted if drafted.token_ids else None
        if not matches and model is None:
            return replace(drafted, reason="no_match") if self._model is None and span.k > 0 else drafted
        proposals = [_of_match(match) for match in matches]
        if model is not None:
            proposals.append(self._of_model(span, model, drawn=model.probs is not None))
        explores = self._num_drafted % EXPLORE_DRAFTS == 0
        self._num_drafted += 1
        tree = merge(proposals, self._budget(span, matches), 0.0 if explores else span.least_acceptance)
        if not tree.token_ids:
            return DraftRow(reason="acceptance") if model is not None else drafted
        self._merged[index] = _Merged(matches, tree.places, model, tree.places[-1])
        if not matches and model is not None and tree.places[-1] == tuple(range(len(model.token_ids))):
            return model  # As the model drafted it.
        by_choice = span.request.row_sampling.greedy or span.request.row_sampling.coupled
        needs_trials = model is not None and not by_choice
        return DraftRow(
            token_ids=tree.token_ids,
            probs=model.probs if model is not None else None,
            confidences=_confidences(model, tree) if model is not None and not matches else (),
            reason=span.reason if span.k > 0 else "plan",
            source=self._source(matches, model),
            match_len=max((match.match_len for match in matches), default=0),
            parents=tree.parents if needs_trials or branches(tree.parents) else (),
            trials=tree.trials if needs_trials else (),
        )

    def _source(self, matches: Sequence[Match], model: DraftRow | None) -> DraftSource:
        if self._model is None or not matches:
            return "method"
        return "lookup" if model is None else "merged"

    def _of_model(self, span: Span, row: DraftRow, *, drawn: bool) -> Proposal:
        workload = span.request.submit.sampling.workload
        parents = row.parents or chain_parents(len(row.token_ids))
        expected, q_rows = [0.0] * len(parents), [-1] * len(parents)
        node_depths = depths(parents)
        for nodes in children_of(parents):
            for rank, node in enumerate(nodes):
                confidence = row.confidences[node] if row.confidences else 1.0
                expected[node] = self._rates_of(span).of_model(
                    workload, confidence, rank, node_depths[node], drawn=drawn
                )
                q_rows[node] = nodes[0]
        return Proposal(row.token_ids, parents, tuple(expected), tuple(q_rows) if drawn else ())

    def _count(self, span: Span, merged: _Merged, row: RowVerdict) -> None:
        """Learn from the verification of one tree."""
        workload, rates = span.request.submit.sampling.workload, self._rates_of(span)
        path = row.path or tuple(range(row.num_accepted))
        if merged.model is not None:
            _count_model(rates, workload, merged.model, merged.model_places, path)
        for match, places in zip(merged.matches, merged.match_places, strict=False):
            _count_match(rates, workload, match, places, path)


def _count_match(
    rates: SourceRates, workload: WorkloadClass, match: Match, places: Sequence[int], path: Sequence[int]
) -> None:
    """Count the verified nodes of a match."""
    found, node = match.continuations, -1
    below = children_of(found.parents)
    for depth in range(len(path) + 1):
        accepted = -1
        for child in below[node + 1]:
            if places[child] >= 0:
                is_accepted = depth < len(path) and places[child] == path[depth]
                accepted = child if is_accepted else accepted
                rates.saw_lookup(
                    *(workload, match.match_len, found.roles[child], depth),
                    is_shared=match.is_shared,
                    accepted=is_accepted,
                )
        if accepted < 0:
            return
        node = accepted


def _count_model(
    rates: SourceRates, workload: WorkloadClass, model: DraftRow, places: Sequence[int], path: Sequence[int]
) -> None:
    """Count the verified nodes of the model's draft."""
    accepted_places = set(path)
    for place, node in enumerate(places):
        if node >= 0:
            rates.saw_place(workload, place, accepted=node in accepted_places)
    if not model.confidences:
        return
    below = children_of(model.parents or chain_parents(len(model.token_ids)))
    node = -1
    for depth in range(len(path) + 1):
        children = [child for child in below[node + 1] if places[child] >= 0]
        if not children:
            return
        promised = sum(model.confidences[child] for child in children)
        if model.probs is not None:  # of drawn siblings each has the largest probability
            promised = 1 - (1 - min(1.0, model.confidences[children[0]])) ** len(children)
        accepted = [child for child in children if depth < len(path) and places[child] == path[depth]]
        rates.saw_model(workload, depth, expected=min(1.0, promised), accepted=bool(accepted))
        if not accepted:
            return
        node = accepted[0]


def _confidences(model: DraftRow, tree: MergedTree) -> tuple[float, ...]:
    """The model's confidences in the order of a tree that has nothing but its nodes."""
    if not model.confidences:
        return ()
    kept = {node: place for place, node in enumerate(tree.places[-1]) if node >= 0}
    return tuple(model.confidences[kept[node]] for node in range(len(tree.token_ids)))


def _of_match(match: Match) -> Proposal:
    found = match.continuations
    return Proposal(found.token_ids, found.parents, found.expected)


def _cumulative(match: Match) -> list[float]:
    """Probability that each node is accepted."""
    reach: list[float] = []
    for parent, share in zip(match.continuations.parents, match.continuations.expected, strict=True):
        reach.append(share * (reach[parent] if parent >= 0 else 1.0))
    return reach
