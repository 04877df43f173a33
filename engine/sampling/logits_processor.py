"""What a request asks of its logits before they become a law: penalties and grammar, at any position.

Owns the state that depends on tokens, and keeps it a function of the tokens alone: `follow` brings it to the committed
ones, `push` goes on along a draft, `rewind` gives the draft up. So nothing advances that has not been accepted, and
preemption or another K changes nothing. Collects what all rows of a step ask and applies it at once. The draft uses
the same code over its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xgrammar

from engine.sampling.grammar import Grammars, Matcher
from engine.sampling.penalties import LogitEdits, Penalties, TokenOptions


class LogitsProcessor:
    """The rules of one request, at one point of its text.

    Args:
        options: of the request.
        matcher: where it stands in its grammar, if it has one.
    """

    def __init__(self, options: TokenOptions, matcher: Matcher | None = None) -> None:
        self.options = options
        self._penalties = Penalties(options)
        self._tokens: list[int] = []
        self.matcher = matcher

    @classmethod
    def make(cls, options: TokenOptions, grammars: Grammars | None) -> LogitsProcessor:
        """Compile the grammar, if there is one; see `Grammars.compile` for what that takes and raises."""
        if options.grammar is None or grammars is None:
            return cls(options)
        return cls(options, Matcher(grammars.compile(options.grammar), options.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        """Tokens followed so far, of prompt and output."""
        return len(self._tokens)

    @property
    def forbids_stop(self) -> bool:
        """Whether min_tokens is still ahead."""
        return len(self._tokens) - self.options.num_prompt < self.options.min_tokens

    @property
    def has_ended(self) -> bool:
        """Whether a stop token has ended the grammar's text."""
        return self.matcher is not None and self.matcher.has_ended

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Of the request."""
        return self.options.stop_token_ids

    def follow(self, tokens: Sequence[int]) -> None:
        """Come to the end of `tokens`, which go on from what was followed before."""
        for token in tokens[len(self._tokens) :]:
            if not self._step(token):
                return

    def push(self, token: int) -> bool:
        """Go on by one token of a draft; False, and nothing changed, when the grammar does not allow it."""
        return self._step(token)

    def rewind(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` tokens."""
        while len(self._tokens) > num_tokens:
            token = self._tokens.pop()
            generated = len(self._tokens) >= self.options.num_prompt
            self._penalties.pop(token, generated=generated)
            if self.matcher is not None and generated:
                self.matcher.pop()

    def edits(self) -> LogitEdits | None:
        """Of single logits at the next position."""
        return self._penalties.edits()

    def _step(self, token: int) -> bool:
        generated = len(self._tokens) >= self.options.num_prompt
        if self.matcher is not None and generated and not self.matcher.push(token):
            return False
        self._penalties.push(token, generated=generated)
        self._tokens.append(token)
        return True


class Columns:
    """Which token each column of the logits stands for, where that is not the column's own number.

    Args:
        vocab: [columns] int64 token ids.
    """

    def __init__(self, vocab: torch.Tensor) -> None:
        self.vocab = vocab
        ids = vocab.cpu().numpy()
        self._of_token = np.full(int(ids.max()) + 1, -1, dtype=np.int64)
        self._of_token[ids] = np.arange(len(ids))

    def of(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Columns of tokens, -1 where there is none."""
        inside = token_ids < len(self._of_token)
        return np.where(inside, self._of_token[np.where(inside, token_ids, 0)], -1)


class BatchLogitsProcessor:
    """Collects what the rules ask of single rows, then changes the logits of all of them at once.

    Args:
        columns: None when column i is token i.
    """

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns
        self._edits: list[tuple[int, LogitEdits]] = []
        self._forbidden: list[tuple[int, tuple[int, ...]]] = []
        self._masked: list[tuple[int, torch.Tensor]] = []

    @property
    def can_exclude_all(self) -> bool:
        """Whether a row may be left without any possible column."""
        return bool(self._masked or self._forbidden)

    def add(self, row: int, logits_processor: LogitsProcessor) -> None:
        """Row `row` of the logits is the position where these rules stand now."""
        edits = logits_processor.edits()
        if edits is not None:
            self._edits.append((row, edits))
        if logits_processor.matcher is not None:
            mask = torch.empty(1, logits_processor.matcher.num_words, dtype=torch.int32)
            logits_processor.matcher.fill(mask, 0, forbid_stop=logits_processor.forbids_stop)
            self._masked.append((row, mask))
        elif logits_processor.forbids_stop:
            self._forbidden.append((row, logits_processor.stop_token_ids))

    def apply(self, logits: torch.Tensor) -> None:
        """Change the collected rows in place.

        Args:
            logits: [R, columns] float32.
        """
        if self._edits:
            self._apply_edits(logits)
        for row, token_ids in self._forbidden:
            # A vocabulary of stop tokens only has no other way to go on.
            if len(token_ids) < logits.shape[-1]:
                _, columns = self._place(np.array(token_ids, dtype=np.int64), logits.shape[-1])
                logits[row, torch.from_numpy(columns).to(logits.device)] = -torch.inf
        if self._masked:
            self._apply_masks(logits)

    def _apply_edits(self, logits: torch.Tensor) -> None:
        rows = np.repeat([row for row, _ in self._edits], [len(edits.token_ids) for _, edits in self._edits])
        token_ids = np.concatenate([edits.token_ids for _, edits in self._edits])
        kept, columns = self._place(token_ids, logits.shape[-1])

        def values(name: str) -> torch.Tensor:
            joined = np.concatenate([getattr(edits, name) for _, edits in self._edits])
            return torch.from_numpy(joined[kept]).to(logits.device)

        where = (torch.from_numpy(rows[kept]).to(logits.device), torch.from_numpy(columns).to(logits.device))
        divisor = values("divisor")
        changed = logits[where] + values("bias")
        changed = torch.where(changed > 0, changed / divisor, changed * divisor)
        logits[where] = changed - values("offset")

    def _place(
        self, token_ids: npt.NDArray[np.int64], num_columns: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Which of these tokens have a column, and the columns of those."""
        columns = token_ids if self._columns is None else self._columns.of(token_ids)
        kept = (columns >= 0) & (columns < num_columns)
        return kept, columns[kept]

    def _apply_masks(self, logits: torch.Tensor) -> None:
        rows = [row for row, _ in self._masked]
        masks = torch.cat([mask for _, mask in self._masked])
        if self._columns is None and logits.device.type == "cpu":
            every = torch.full((len(logits), masks.shape[1]), -1, dtype=torch.int32)
            every[rows] = masks
            xgrammar.apply_token_bitmask_inplace(logits, every, vocab_size=logits.shape[-1], indices=rows)
            return
        bits = (masks.to(logits.device).unsqueeze(-1) >> torch.arange(32, device=logits.device)) & 1
        allowed = bits.flatten(1).bool()
        allowed = allowed[:, : logits.shape[-1]] if self._columns is None else allowed[:, self._columns.vocab]
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
