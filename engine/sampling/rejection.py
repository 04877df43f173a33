"""Which draft tokens are accepted and which token follows them, for all spans of a step together.

Owns the tensor form of the acceptance rules. Every result stays on the device of the logits: nothing here reads a value
back to the host. `engine.core.acceptance` holds the slow twin, which treats one span after the other.

    span s, k = 2     rows            first     first + 1   first + 2
                      draft tokens    t0        t1          -
                      n accepted      0: r0     1: r1       2: bonus         the row that yields the last token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.sampling.distribution import draw, gumbel_of_words


@dataclass(frozen=True, slots=True)
class DraftTable:
    """The draft tokens of S spans, padded to the longest draft."""

    token_ids: torch.Tensor
    """[S, K] int64, padded with -1."""
    lengths: torch.Tensor
    """[S] int64 draft tokens of each span."""
    first_rows: torch.Tensor
    """[S] int64 first of the lengths[s] + 1 rows of each span."""


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The draft distributions q of the tokens of a `DraftTable`."""

    values: torch.Tensor | None
    """[M, columns] float32; None if no span was drafted from a distribution."""
    rows: torch.Tensor
    """[S, K] int64 row of `values` of each draft token; 0 where there is none."""
    drafted_from_q: torch.Tensor
    """[S] bool: False for spans whose draft tokens were certain (q is one-hot)."""
    vocab: torch.Tensor | None
    """[columns] int64 target token id of each column; None: column i is token i."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for S spans."""

    num_accepted: torch.Tensor
    """[S] int64 accepted draft tokens."""
    last_token: torch.Tensor
    """[S] int64 the token after them: recovered, bonus or plain."""

    def emitted(self, drafts: DraftTable) -> torch.Tensor:
        """[S, K + 1] int64 emitted tokens; positions after the last token repeat it."""
        padded = torch.nn.functional.pad(drafts.token_ids, (0, 1))
        position = torch.arange(padded.shape[1], device=padded.device)
        return torch.where(position < self.num_accepted.unsqueeze(1), padded, self.last_token.unsqueeze(1))


def compare(choices: torch.Tensor, drafts: DraftTable) -> Outcome:
    """Accept draft tokens as long as they equal the target's choice; the next choice is the last token.

    Args:
        choices: [R] int64, the target's token of each row.
        drafts: the draft tokens.
    """
    rows = drafts.first_rows.unsqueeze(1) + torch.arange(drafts.token_ids.shape[1], device=choices.device)
    matches = choices[rows.clamp_(max=len(choices) - 1)] == drafts.token_ids  # Padding never matches.
    num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Outcome(num_accepted, choices[drafts.first_rows + num_accepted])


def reject(
    target_probs: torch.Tensor, drafts: DraftTable, draft_probs: DraftProbs, uniforms: torch.Tensor, words: torch.Tensor
) -> Outcome:
    """Rejection sampling (Leviathan et al. 2023, algorithm 1).

    A draft token is accepted with probability min(1, p / q). After a rejection the last token is drawn from
    max(p - q, 0), else from p of the next row.

    Args:
        target_probs: [R, V] float32 p, after all sampling options.
        drafts: the draft tokens.
        draft_probs: the distributions q they were drawn from.
        uniforms: [S, K] float64 in [0, 1), one per draft token.
        words: [S, K + 1, 2] int32 seed words of the last token, by number of accepted draft tokens.
    """
    tokens = drafts.token_ids.clamp(min=0)
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    rows = (drafts.first_rows.unsqueeze(1) + offsets).clamp_(max=len(target_probs) - 1)
    p = target_probs[rows, tokens].double()
    q = _q_of_tokens(tokens, draft_probs).double()
    accepted = (uniforms * q < p) & (offsets < drafts.lengths.unsqueeze(1))
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
    weights = target_probs.index_select(0, drafts.first_rows + num_accepted)
    if tokens.shape[1] > 0:
        weights = _residual(weights, tokens, num_accepted, drafts.lengths, draft_probs)
    last_words = words.gather(1, num_accepted.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
    noise = gumbel_of_words(last_words, torch.arange(weights.shape[1], device=weights.device))
    return Outcome(num_accepted, draw(weights, noise))


def _q_of_tokens(tokens: torch.Tensor, draft_probs: DraftProbs) -> torch.Tensor:
    """[S, K] float32 q of each draft token; 1 where the draft was certain."""
    values, vocab = draft_probs.values, draft_probs.vocab
    if values is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    columns = tokens
    if vocab is not None:
        ascending, order = vocab.sort()
        # A token without a column belongs to a span that was not drafted from q; its value is not used.
        columns = order[torch.searchsorted(ascending, tokens).clamp_(max=len(vocab) - 1)]
    q = values[draft_probs.rows, columns.clamp(max=values.shape[1] - 1)]
    return torch.where(draft_probs.drafted_from_q.unsqueeze(1), q, 1.0)


def _residual(
    target_probs: torch.Tensor,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    lengths: torch.Tensor,
    draft_probs: DraftProbs,
) -> torch.Tensor:
    """[S, V] weights of the last token: max(p - q, 0) after a rejection, else p.

    Args:
        target_probs: [S, V] p of the row that yields the last token.
    """
    at = num_accepted.clamp(max=tokens.shape[1] - 1).unsqueeze(1)
    token = tokens.gather(1, at)
    q = torch.zeros_like(target_probs)
    certain = torch.ones_like(token, dtype=q.dtype)
    if draft_probs.values is not None:
        from_q = draft_probs.drafted_from_q.unsqueeze(1)
        drafted = draft_probs.values.index_select(0, draft_probs.rows.gather(1, at).squeeze(1)) * from_q
        if draft_probs.vocab is None:
            width = min(drafted.shape[1], q.shape[1])
            q[:, :width] = drafted[:, :width]
        else:
            q.index_copy_(1, draft_probs.vocab, drafted)
        certain = torch.where(from_q, q.gather(1, token), certain)
    q.scatter_(1, token, certain)
    residual = (target_probs - q).clamp_(min=0.0)
    # Where p equals q but for rounding, the residual is empty, and p itself is the right distribution.
    use_residual = (num_accepted < lengths).unsqueeze(1) & (residual.amax(dim=1, keepdim=True) > 0)
    return torch.where(use_residual, residual, target_probs)
