"""The acceptance rules: from the target's logits of drafted spans to accepted tokens and the token after them.

Owns the implementation that treats all spans together on the device of the logits and reads nothing back; a GPU uses
it. Its twin `engine.core.acceptance_each` decides one span after the other; a CPU uses it. Both give equal results, and
take logits that penalties and grammars have changed already. Three exact rules:

    greedy      The target's most likely token is a function of the context. A draft token is accepted if it is that
                token.
    coupled     For seeded requests the target's token is a function of (context, stream, position), drawn with Gumbel
                noise that the draft shares (Daliri, Musco, Suresh 2024). A draft token is accepted if it is that token.
                The output does not depend on the draft, so equal seeds give equal text at every K.
    rejection   A draft token is accepted with probability min(1, p / q). After a rejection p becomes max(p - q, 0) and
                q loses the token; the next sibling is tried, or else the token is drawn from p (Leviathan et al. 2023,
                algorithm 1; for siblings drawn without replacement, Miao et al. 2023 and Jeon et al. 2024). A token
                that was certain has a q of its own, and the q of drawn siblings does not lose it.

In a tree every rule walks from the root position to an accepted child, until no child is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct

from engine.core.step import DeviceDrafts, DraftRow, Span, Trial
from engine.sampling.distribution import (
    Purpose,
    draw,
    gumbel_of_words,
    most_likely,
    seed_words,
    stream_seed,
    uniform,
    warp,
)
from engine.sampling.rejection import Branches, DraftProbs, DraftTable, Outcome, compare, reject
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_device
from engine.tree import branches, chain_parents, children_of, depths

AcceptanceKind = Literal["auto", "together", "each"]
"""`together`: `accept_all`. `each`: `accept_each`. `auto`: `together` on a GPU, `each` on a CPU."""


class SampledSpan(Struct, frozen=True, gc=False):
    """One span that yields tokens, with its draft and its logit rows."""

    index: int
    """Index of the span in the batch."""
    span: Span
    draft_row: DraftRow
    rows: range
    """Its logit rows: one per draft token, then one more."""
    sampling: RowSampling

    @property
    def by_choice(self) -> bool:
        """Whether the target's token is a function of context and stream, so that drafts are only compared with it."""
        return self.sampling.greedy or self.sampling.coupled

    @property
    def branches(self) -> bool:
        """Whether the draft is not a chain whose tokens are tried once each."""
        return bool(self.draft_row.trials) or branches(self.draft_row.parents)

    @property
    def parents(self) -> tuple[int, ...]:
        """[num_tokens] parent of each draft token, written out for a chain too."""
        return self.draft_row.parents or chain_parents(self.draft_row.num_tokens)

    @property
    def children(self) -> list[list[int]]:
        """[num_tokens + 1] children of the root position and of each draft token."""
        return children_of(self.parents)

    @property
    def trials(self) -> list[list[Trial]]:
        """[num_tokens + 1] attempts of rejection sampling at the root position and at each draft token, in order."""
        drawn = self.draft_row.probs is not None
        if not self.draft_row.trials:
            return [[Trial(node, nodes[0] if drawn else -1) for node in nodes] for nodes in self.children]
        found: list[list[Trial]] = [[] for _ in self.rows]
        for trial in self.draft_row.trials:
            found[self.draft_row.parents[trial.node] + 1].append(trial)
        return found

    @property
    def row_depths(self) -> Sequence[int]:
        """[num_tokens + 1] depth below the last committed token at which each row's token is."""
        if not self.branches:
            return range(len(self.rows))
        return [0, *(depth + 1 for depth in depths(self.draft_row.parents))]

    @property
    def position(self) -> int:
        """Position of the first draft token in the request."""
        return len(self.span.request.tokens)


def draft_table(
    spans: Sequence[SampledSpan],
    device: torch.device,
    on_device: DeviceDrafts | None = None,
    *,
    branching: bool | None = None,
) -> DraftTable:
    """The draft tokens of the spans; `first_rows` counts the rows of these spans only, one span after the other.

    Args:
        spans: the spans.
        device: of the table.
        on_device: the draft tokens that only the device has.
        branching: whether the table has trees; None: where one of these spans has branches.
    """
    lengths = np.array([span.draft_row.num_tokens for span in spans], dtype=np.int64)
    token_ids = np.full((len(spans), int(lengths.max(initial=0))), -1, dtype=np.int64)
    first_rows = np.cumsum(lengths + 1) - (lengths + 1)
    if branching is None:
        branching = any(span.branches for span in spans)
    trees = _trees(spans, token_ids.shape[1], device) if branching else None
    for row, span in enumerate(spans):
        if not span.draft_row.num_on_device:
            token_ids[row, : lengths[row]] = span.draft_row.token_ids
    if on_device is None:
        table, length, first_row = to_device([token_ids, lengths, first_rows], device)
        return DraftTable(table, length, first_row, trees)
    places = np.full(token_ids.shape, -1, dtype=np.int64)
    for row, span in enumerate(spans):
        first = span.draft_row.device_row * on_device.token_ids.shape[1]
        places[row, : span.draft_row.num_on_device] = range(first, first + span.draft_row.num_on_device)
    table, place, length, first_row = to_device([token_ids, places, lengths, first_rows], device)
    drafted = on_device.token_ids.view(-1)[place.clamp(min=0)]
    return DraftTable(torch.where(place >= 0, drafted, table), length, first_row, trees)


def _trees(spans: Sequence[SampledSpan], max_k: int, device: torch.device) -> Branches:
    """The trees of the spans, chains among them."""
    all_trials = [span.trials for span in spans]
    width = max(len(trials) for span_trials in all_trials for trials in span_trials)
    parents = np.full((len(spans), max_k), -2, dtype=np.int64)
    children = np.full((len(spans), max_k + 1, max(1, width)), max_k, dtype=np.int64)
    drawn = np.zeros(children.shape, dtype=bool)
    forks = []
    max_depth = 0
    for index, (span, span_trials) in enumerate(zip(spans, all_trials, strict=True)):
        parents[index, : len(span.parents)] = span.parents
        max_depth = max(max_depth, 1 + max(depths(span.parents), default=-1))
        for row, trials in enumerate(span_trials):
            children[index, row, : len(trials)] = [trial.node for trial in trials]
            drawn[index, row, : len(trials)] = [trial.q_row >= 0 for trial in trials]
            if len(trials) > 1:
                forks.append((index, row))
    on_device = to_device([parents, children, drawn, np.array(forks, dtype=np.int64).reshape(-1, 2)], device)
    return Branches(on_device[0], on_device[1], on_device[2], max_depth, on_device[3])


def accept_all(
    logits: torch.Tensor,
    spans: Sequence[SampledSpan],
    vocab: torch.Tensor | None,
    on_device: DeviceDrafts | None = None,
    found: torch.Tensor | None = None,
) -> Outcome:
    """Apply the rules to all spans together, without a read from the device.

    Args:
        logits: [R, V] float32.
        spans: the spans; those that are `by_choice` come first.
        vocab: [draft_vocab] int64 target token id of each column of the draft's probabilities, or None.
        on_device: the draft tokens that only the device has.
        found: [R] int64 column of the largest logit of each row, if it has been found already.

    Returns:
        The outcome of each span, on the device of the logits.
    """
    num_choices = sum(span.by_choice for span in spans)
    branching = any(span.branches for span in spans)
    outcomes = []
    if num_choices > 0:
        group = spans[:num_choices]
        choices = target_choices(rows_of(logits, group), group, None if found is None else rows_of(found, group))
        outcomes.append(compare(choices, draft_table(group, logits.device, on_device, branching=branching)))
    if num_choices < len(spans):
        group = spans[num_choices:]
        drafts = draft_table(group, logits.device, on_device, branching=branching)
        outcomes.append(_reject_all(logits, group, drafts, vocab, on_device))
    return outcomes[0] if len(outcomes) == 1 else _joined(outcomes)


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of all spans. Either all of them have paths or none."""
    paths = [outcome.path for outcome in outcomes if outcome.path is not None]
    width = max((path.shape[1] for path in paths), default=0)
    return Outcome(
        torch.cat([outcome.num_accepted for outcome in outcomes]),
        torch.cat([outcome.last_token for outcome in outcomes]),
        torch.cat([F.pad(path, (0, width - path.shape[1]), value=-1) for path in paths]) if paths else None,
    )


def rows_of(values: torch.Tensor, spans: Sequence[SampledSpan]) -> torch.Tensor:
    """The values of the logit rows of these spans, one span after the other."""
    rows = [row for span in spans for row in span.rows]
    if rows == list(range(len(values))):
        return values
    (index,) = to_device([np.array(rows, dtype=np.int64)], values.device)
    return values.index_select(0, index)


def target_choices(
    logits: torch.Tensor, spans: Sequence[SampledSpan], found: torch.Tensor | None = None
) -> torch.Tensor:
    """[R] int64: the target's token of each row of greedy and coupled spans.

    Args:
        logits: [R, V] of these spans.
        spans: greedy and coupled ones.
        found: [R] int64 column of the largest logit of each row; None searches for it.
    """
    coupled: list[int] = []
    samplings: list[RowSampling] = []
    seeds: list[int] = []
    first = 0
    for span in spans:
        if not span.sampling.greedy:
            coupled += range(first, first + len(span.rows))
            samplings += [span.sampling] * len(span.rows)
            seeds += [draw_seed(span, depth, Purpose.TOKEN) for depth in span.row_depths]
        first += len(span.rows)
    if not coupled:
        return most_likely(logits) if found is None else found
    index, words = to_device([np.array(coupled, dtype=np.int64), seed_words(seeds)], logits.device)
    all_coupled = len(coupled) == len(logits)
    probs = warp(logits if all_coupled else logits.index_select(0, index), samplings)
    drawn = draw(probs, gumbel_of_words(words, torch.arange(probs.shape[-1], device=probs.device)))
    if all_coupled:
        return drawn
    return (most_likely(logits) if found is None else found).index_copy(0, index, drawn)


def _reject_all(
    logits: torch.Tensor,
    spans: Sequence[SampledSpan],
    drafts: DraftTable,
    vocab: torch.Tensor | None,
    on_device: DeviceDrafts | None,
) -> Outcome:
    """Rejection sampling over all spans that use it."""
    max_k = drafts.token_ids.shape[1]
    uniforms = np.zeros((len(spans), max_k))
    seeds = np.zeros((len(spans), max_k + 1), dtype="<u8")
    rows = np.zeros((len(spans), max_k), dtype=np.int64)
    from_q = np.zeros((len(spans), max_k), dtype=bool)
    values: list[torch.Tensor] = []
    num_values = 0
    in_place = on_device is not None and all(
        span.draft_row.num_on_device > 0 for span in spans if span.draft_row.probs is not None
    )
    for index, span in enumerate(spans):
        probs, first = span.draft_row.probs, num_values
        if probs is not None and on_device is not None and in_place:
            first = span.draft_row.device_row * on_device.probs.shape[1]
        elif probs is not None and len(probs) > 0:
            values.append(probs)
            num_values += len(probs)
        for row, (trials, depth) in enumerate(zip(span.trials, span.row_depths, strict=True)):
            seeds[index, row] = draw_seed(span, depth, Purpose.RECOVER if trials else Purpose.TOKEN)
            q_row = max((trial.q_row for trial in trials), default=-1)  # drawn siblings have the same one
            for rank, trial in reversed(list(enumerate(trials))):  # the first attempt at a node decides
                uniforms[index, trial.node] = uniform(draw_seed(span, depth, Purpose.ACCEPT, rank))
                from_q[index, trial.node] = trial.q_row >= 0
                rows[index, trial.node] = first + q_row if q_row >= 0 else 0
    words = seed_words(seeds.reshape(-1).tolist()).reshape(*seeds.shape, 2)
    uniform_rows, word_rows, q_rows, drafted_from_q = to_device([uniforms, words, rows, from_q], logits.device)
    stacked = None
    if on_device is not None and in_place and from_q.any():
        stacked = on_device.probs.flatten(0, 1)  # q is read where the draft wrote it.
    elif values:
        stacked = values[0] if len(values) == 1 else torch.cat(values)
    target_probs = warp(rows_of(logits, spans), [span.sampling for span in spans for _ in span.rows])
    return reject(target_probs, drafts, DraftProbs(stacked, q_rows, drafted_from_q, vocab), uniform_rows, word_rows)


def draw_seed(span: SampledSpan, depth: int, purpose: Purpose, rank: int = 0) -> int:
    """The seed of a draw at a depth below the last committed token, for the sibling of a rank where several draw."""
    sampling = span.sampling
    return stream_seed(sampling.stream_key, span.position + depth + (rank << 32), purpose, sampling.attempt)
