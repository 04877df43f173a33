"""Which draft tokens are accepted and which token follows them, for all spans of a step together.

Owns the tensor form of the acceptance rules. Every result stays on the device of the logits: nothing here reads a value
back to the host. `engine.core.acceptance` holds the slow twin, which treats one span after the other.

    span s, chain of 2   rows            first     first + 1   first + 2
                         draft tokens    t0        t1          -
                         n accepted      0: r0     1: r1       2: bonus      the row that yields the last token
    span s, tree         node j has row first + 1 + j; its token is verified by the row of its parent
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.sampling.distribution import draw, gumbel_of_words


@dataclass(frozen=True, slots=True)
class Branches:
    """The trees of S spans with at most K nodes each; chains are among them."""

    parents: torch.Tensor
    """[S, K] int64 parent of each node, -1 for the root position, -2 for padding."""
    children: torch.Tensor
    """[S, K + 1, W] int64 children of the root position and of each node, in the order in which they are tried, padded
    with K. One that two proposers have is there twice."""
    drawn: torch.Tensor
    """[S, K + 1, W] bool whether the token that is tried was drawn from q; False where it was certain."""
    max_depth: int
    """Nodes of the longest path."""
    forks: torch.Tensor
    """[B, 2] int64 span and row (0: root position, 1 + node) of the positions with several children."""


@dataclass(frozen=True, slots=True)
class DraftTable:
    """The draft tokens of S spans, padded to the longest draft."""

    token_ids: torch.Tensor
    """[S, K] int64, padded with -1."""
    lengths: torch.Tensor
    """[S] int64 draft tokens of each span."""
    first_rows: torch.Tensor
    """[S] int64 first of the lengths[s] + 1 rows of each span."""
    branches: Branches | None = None
    """The trees; None where every draft is a chain."""

    def parent_rows(self) -> torch.Tensor:
        """[S, K] int64 row that verifies each token. Padding has some row of any span."""
        width = self.token_ids.shape[1]
        if self.branches is None:
            return self.first_rows.unsqueeze(1) + torch.arange(width, device=self.first_rows.device)
        return self.first_rows.unsqueeze(1) + self.branches.parents.clamp(min=-1) + 1


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The draft distributions q of the tokens of a `DraftTable`."""

    values: torch.Tensor | None
    """[M, columns] float32; None if no span was drafted from a distribution."""
    rows: torch.Tensor
    """[S, K] int64 row of `values` of each draft token; siblings have the same one. 0 where there is none."""
    drafted_from_q: torch.Tensor
    """[S, K] bool: False for draft tokens that were certain (q is one-hot)."""
    vocab: torch.Tensor | None
    """[columns] int64 target token id of each column; None: column i is token i."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for S spans."""

    num_accepted: torch.Tensor
    """[S] int64 accepted draft tokens."""
    last_token: torch.Tensor
    """[S] int64 the token after them: recovered, bonus or plain."""
    path: torch.Tensor | None = None
    """[S, K] int64 accepted nodes, padded with -1; None where every draft is a chain, whose first tokens are
    accepted."""

    def emitted(self, drafts: DraftTable) -> torch.Tensor:
        """[S, K + 1] int64 emitted tokens; positions after the last token repeat it."""
        tokens = drafts.token_ids if self.path is None else drafts.token_ids.gather(1, self.path.clamp(min=0))
        padded = torch.nn.functional.pad(tokens, (0, 1))
        position = torch.arange(padded.shape[1], device=padded.device)
        return torch.where(position < self.num_accepted.unsqueeze(1), padded, self.last_token.unsqueeze(1))

    def rows(self, drafts: DraftTable) -> torch.Tensor:
        """[S, K + 1] int64 row that yields each emitted token; positions after the last token have some row."""
        width = drafts.token_ids.shape[1]
        first = drafts.first_rows.unsqueeze(1)
        if self.path is None:
            return first + torch.arange(width + 1, device=first.device)
        return first + torch.nn.functional.pad(self.path + 1, (1, 0))


def compare(choices: torch.Tensor, drafts: DraftTable) -> Outcome:
    """Accept draft tokens as long as they equal the target's choice; the next choice is the last token.

    Args:
        choices: [R] int64, the target's token of each row.
        drafts: the draft tokens.
    """
    rows = drafts.parent_rows().clamp_(max=len(choices) - 1)
    num_accepted, last_row, path = _walk(choices[rows] == drafts.token_ids, drafts)  # Padding never matches.
    return Outcome(num_accepted, choices[drafts.first_rows + last_row], path)


def _walk(accepted: torch.Tensor, drafts: DraftTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Follow the accepted tokens from the root position on, at each one the first accepted child.

    Args:
        accepted: [S, K] bool whether each token is accepted once its parent is and its earlier siblings are not.

    Returns:
        [S] number of accepted tokens, [S] row after them, counted from the span's first, and `Outcome.path`.
    """
    branches = drafts.branches
    if branches is None:
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        return num_accepted, num_accepted, None
    node = torch.full_like(drafts.lengths, -1)
    goes_on = torch.ones_like(node, dtype=torch.bool)
    path = torch.full_like(drafts.token_ids, -1)
    for depth in range(branches.max_depth):
        fits = accepted & (branches.parents == node.unsqueeze(1))
        goes_on = goes_on & fits.any(dim=1)
        node = torch.where(goes_on, fits.long().argmax(dim=1), node)
        path[:, depth] = torch.where(goes_on, node, -1)
    return (path >= 0).sum(dim=1), node + 1, path


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, V] max(p - q, 0), not normalised. Where p equals q but for rounding it is empty, and p itself is right."""
    rest = (p - q).clamp_(min=0.0)
    return torch.where(rest.amax(dim=1, keepdim=True) > 0, rest, p)


def after_rejection(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions of the next sibling once a token drawn from q has been rejected (SpecInfer, Miao et al. 2023;
    recursive rejection sampling, Yang et al. 2024 and Jeon et al. 2024).

    Args:
        p: [B, V] what remains of the target's distribution.
        q: [B, V] what the token was drawn from.
        tokens: [B] int64 rejected tokens.

    Returns:
        `residual` and q without the token, each normalised. The second one is zero where q was certain of the token.
    """
    after, rest = residual(p, q), q.scatter(1, tokens.unsqueeze(1), 0.0)
    mass = rest.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    return after / after.sum(dim=1, keepdim=True), rest / mass


def reject(
    target_probs: torch.Tensor, drafts: DraftTable, draft_probs: DraftProbs, uniforms: torch.Tensor, words: torch.Tensor
) -> Outcome:
    """Rejection sampling (Leviathan et al. 2023, algorithm 1; with siblings, `after_rejection`).

    A draft token is accepted with probability min(1, p / q). After the rejection of all children the last token is
    drawn from what remains of p, and after an accepted token without children from p of its row.

    Args:
        target_probs: [R, V] float32 p, after all sampling options.
        drafts: the draft tokens.
        draft_probs: the distributions q they were drawn from.
        uniforms: [S, K] float64 in [0, 1), one per draft token.
        words: [S, K + 1, 2] int32 seed words of the last token, by the row that yields it.
    """
    tokens = drafts.token_ids.clamp(min=0)
    rows = drafts.parent_rows().clamp_(max=len(target_probs) - 1)
    p = target_probs[rows, tokens].double()
    q = _q_of_tokens(tokens, draft_probs).double()
    accepted = (uniforms * q < p) & (drafts.token_ids >= 0)
    if drafts.branches is not None and len(drafts.branches.forks) > 0:
        accepted = _accept_siblings(accepted, target_probs, drafts, drafts.branches, draft_probs, uniforms)
    num_accepted, last_row, path = _walk(accepted, drafts)
    weights = target_probs.index_select(0, drafts.first_rows + last_row)
    if tokens.shape[1] > 0:
        children, drawn = _tried_last(last_row, drafts, draft_probs)
        *_, last = _rejections(weights, children, drawn, tokens, drafts.lengths, draft_probs)
        weights = torch.where(last.real, residual(last.p, last.q), last.p)
    last_words = words.gather(1, last_row.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
    noise = gumbel_of_words(last_words, torch.arange(weights.shape[1], device=weights.device))
    return Outcome(num_accepted, draw(weights, noise), path)


def _accept_siblings(
    accepted: torch.Tensor,
    target_probs: torch.Tensor,
    drafts: DraftTable,
    branches: Branches,
    draft_probs: DraftProbs,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """`accepted` with the children of forks: whether each is accepted once the children before it are rejected."""
    spans, rows = branches.forks.unbind(1)
    of_forks = replace(draft_probs, rows=draft_probs.rows[spans])
    p = target_probs.index_select(0, drafts.first_rows[spans] + rows)
    tokens = drafts.token_ids[spans].clamp(min=0)
    children, drawn = branches.children[spans, rows], branches.drawn[spans, rows]
    padded = torch.nn.functional.pad(accepted, (0, 1))  # Padding children write to the last column.
    tried = torch.zeros_like(padded)
    trials = _rejections(p, children, drawn, tokens, drafts.lengths[spans], of_forks)
    for child, trial in zip(children.unbind(1), trials, strict=True):
        of_p, of_q = (part.gather(1, trial.token).squeeze(1).double() for part in (trial.p, trial.q))
        fits = uniforms[spans, trial.node] * of_q < of_p
        padded[spans, child] = torch.where(tried[spans, child], padded[spans, child], fits)
        tried[spans, child] = True
    return padded[:, :-1]


def _tried_last(
    last_row: torch.Tensor, drafts: DraftTable, draft_probs: DraftProbs
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, W] children of the row that yields the last token, all of them rejected, padded with the largest length; and
    [S, W] whether they were drawn."""
    if drafts.branches is None:
        return last_row.unsqueeze(1), draft_probs.drafted_from_q[:, :1]  # A chain is drawn as a whole, or certain.
    rows = last_row.view(-1, 1, 1).expand(-1, 1, drafts.branches.children.shape[2])
    return drafts.branches.children.gather(1, rows).squeeze(1), drafts.branches.drawn.gather(1, rows).squeeze(1)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The same place among the siblings at B positions, once the siblings before are rejected."""

    node: torch.Tensor
    """[B] the child; any node where there is none."""
    real: torch.Tensor
    """[B, 1] bool whether there is one."""
    token: torch.Tensor
    """[B, 1] its token."""
    p: torch.Tensor
    """[B, V] what remains of the target's distribution."""
    q: torch.Tensor
    """[B, V] what the token was drawn from."""


def _rejections(
    p: torch.Tensor,
    children: torch.Tensor,
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    draft_probs: DraftProbs,
) -> Iterator[_Trial]:
    """Try the children of B positions one after the other, each after the rejection of the one before.

    Args:
        p: [B, V] the target's distribution at each position.
        children: [B, W] their children, padded with any number from the draft's length on.
        drawn: [B, W] whether each was drawn from q.
        tokens: [B, K] draft tokens of the position's span.
        lengths: [B] their number.
        draft_probs: with [B, K] rows of the position's span.
    """
    rest = None
    nodes, real = children.clamp(max=tokens.shape[1] - 1), children < lengths.unsqueeze(1)
    all_tokens = tokens.gather(1, nodes)
    if draft_probs.values is not None:
        rest = _dense_q(p, draft_probs.rows.gather(1, nodes[:, :1]).squeeze(1), draft_probs)
    for place in range(children.shape[1]):
        here = slice(place, place + 1)
        token, from_q = all_tokens[:, here], drawn[:, here]
        if rest is None:
            q = torch.zeros_like(p).scatter_(1, token, 1.0)
        else:
            q = torch.where(from_q, rest, 0.0)
            q.scatter_(1, token, torch.where(from_q, q.gather(1, token), 1.0))
        yield _Trial(nodes[:, place], real[:, here], token, p, q)
        if place + 1 < children.shape[1]:
            after, q_after = after_rejection(p, q, token.squeeze(1))
            p = torch.where(real[:, here], after, p)
            rest = None if rest is None else torch.where(real[:, here] & from_q, q_after, rest)


def _dense_q(like: torch.Tensor, rows: torch.Tensor, draft_probs: DraftProbs) -> torch.Tensor:
    """[B, V] q of B positions over the target's vocabulary.

    Args:
        like: [B, V].
        rows: [B] row of `DraftProbs.values` of each.
        draft_probs: with values.
    """
    q = torch.zeros_like(like)
    if draft_probs.values is None:
        return q
    drafted = draft_probs.values.index_select(0, rows)
    if draft_probs.vocab is not None:
        return q.index_copy_(1, draft_probs.vocab, drafted)
    width = min(drafted.shape[1], q.shape[1])
    q[:, :width] = drafted[:, :width]
    return q


def _q_of_tokens(tokens: torch.Tensor, draft_probs: DraftProbs) -> torch.Tensor:
    """[S, K] float32 q of each draft token; 1 where the draft was certain."""
    values, vocab = draft_probs.values, draft_probs.vocab
    if values is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    columns = tokens
    if vocab is not None:
        ascending, order = vocab.sort()
        # A token without a column was not drawn from q; its value is not used.
        columns = order[torch.searchsorted(ascending, tokens).clamp_(max=len(vocab) - 1)]
    q = values[draft_probs.rows, columns.clamp(max=values.shape[1] - 1)]
    return torch.where(draft_probs.drafted_from_q, q, 1.0)
