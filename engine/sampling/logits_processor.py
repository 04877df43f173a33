"""Penalties, bias, min_tokens and grammar of a request, applied to its logits at any drafted or committed position.

Owns the state of a request that depends on its tokens. That state is a function of the tokens alone: `follow` advances
it to the committed tokens, `push` advances it along a draft, `rewind` rolls the draft back. Therefore K and preemption
do not change it. `BatchLogitsProcessor` collects the changes of all rows of a step and applies them together. The
draft uses the same code over its own logit columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xgrammar

from engine.sampling.grammar import Grammars, Matcher
from engine.sampling.penalties import LogitEdits, Penalties, TokenOptions
from engine.sampling.staging import to_device


class LogitsProcessor:
    """The logits processor of one request, at one position of its tokens.

    Args:
        options: options of the request.
        matcher: grammar state; None for a request without a grammar.
    """

    def __init__(self, options: TokenOptions, matcher: Matcher | None = None) -> None:
        self.options = options
        self._penalties = Penalties(options)
        self._tokens: list[int] = []
        self.matcher = matcher

    @classmethod
    def make(cls, options: TokenOptions, grammars: Grammars | None) -> LogitsProcessor:
        """Make a processor and compile the grammar, if any. Takes as long and raises as `Grammars.compile`."""
        if options.grammar is None or grammars is None:
            return cls(options)
        return cls(options, Matcher(grammars.compile(options.grammar), options.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens processed so far."""
        return len(self._tokens)

    @property
    def forbids_stop(self) -> bool:
        """Whether fewer than min_tokens tokens have been generated, so that no stop token is allowed."""
        return len(self._tokens) - self.options.num_prompt < self.options.min_tokens

    def forbids_stop_after(self, num_drafted: int) -> bool:
        """`forbids_stop` after as many further tokens, whatever they are."""
        return len(self._tokens) + num_drafted - self.options.num_prompt < self.options.min_tokens

    @property
    def has_ended(self) -> bool:
        """Whether a stop token has ended the text of the grammar."""
        return self.matcher is not None and self.matcher.has_ended

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Stop tokens of the request."""
        return self.options.stop_token_ids

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance to the end of `tokens`, which must extend the tokens processed before."""
        for token in tokens[len(self._tokens) :]:
            if not self._step(token):
                return

    def push(self, token: int) -> bool:
        """Advance by one draft token. Returns False and changes nothing if the grammar does not allow the token."""
        return self._step(token)

    def rewind(self, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` tokens."""
        while len(self._tokens) > num_tokens:
            token = self._tokens.pop()
            generated = len(self._tokens) >= self.options.num_prompt
            self._penalties.pop(token, generated=generated)
            if self.matcher is not None and generated:
                self.matcher.pop()

    def edits(self) -> LogitEdits | None:
        """Changes of single logits at the next position; None if there are none."""
        return self._penalties.edits()

    def _step(self, token: int) -> bool:
        generated = len(self._tokens) >= self.options.num_prompt
        if self.matcher is not None and generated and not self.matcher.push(token):
            return False
        self._penalties.push(token, generated=generated)
        self._tokens.append(token)
        return True


class Columns:
    """The mapping between token ids and logit columns of a draft with a reduced vocabulary.

    Args:
        vocab: [columns] int64 token id of each column.
    """

    def __init__(self, vocab: torch.Tensor) -> None:
        self.vocab = vocab
        ids = vocab.cpu().numpy()
        self._of_token = np.full(int(ids.max()) + 1, -1, dtype=np.int64)
        self._of_token[ids] = np.arange(len(ids))

    def of(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The column of each token; -1 for tokens without a column."""
        inside = token_ids < len(self._of_token)
        return np.where(inside, self._of_token[np.where(inside, token_ids, 0)], -1)


class BatchLogitsProcessor:
    """Collects the changes of single rows, then applies them to the logits of all rows together.

    Args:
        columns: mapping of a reduced vocabulary; None means that column i is token i.
    """

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns
        self._edits: list[tuple[int, LogitEdits]] = []
        self._forbidden: list[tuple[int, tuple[int, ...]]] = []
        self._masked: list[tuple[int, npt.NDArray[np.int32]]] = []

    @property
    def can_exclude_all(self) -> bool:
        """Whether a row can have no allowed column left after `apply`."""
        return bool(self._masked or self._forbidden)

    def add(self, row: int, logits_processor: LogitsProcessor) -> None:
        """Apply the processor, at its current position, to row `row` of the logits."""
        edits = logits_processor.edits()
        if edits is not None:
            self._edits.append((row, edits))
        if logits_processor.matcher is not None:
            mask = np.empty((1, logits_processor.matcher.num_words), dtype=np.int32)
            logits_processor.matcher.fill(mask, 0, forbid_stop=logits_processor.forbids_stop)
            self._masked.append((row, mask))
        elif logits_processor.forbids_stop:
            self._forbidden.append((row, logits_processor.stop_token_ids))

    def add_ahead(self, row: int, logits_processor: LogitsProcessor, num_drafted: int) -> None:
        """Apply to row `row` what is known before `num_drafted` further tokens are: bias, the penalties of the tokens
        so far and min_tokens, but no grammar."""
        edits = logits_processor.edits()
        if edits is not None:
            self._edits.append((row, edits))
        if logits_processor.forbids_stop_after(num_drafted):
            self._forbidden.append((row, logits_processor.stop_token_ids))

    def apply(self, logits: torch.Tensor) -> None:
        """Change the collected rows in place. The host does not wait for the device.

        Args:
            logits: [R, columns] float32.
        """
        if self._edits:
            self._apply_edits(logits)
        if self._forbidden:
            self._apply_forbidden(logits)
        if self._masked:
            self._apply_masks(logits)

    def _apply_edits(self, logits: torch.Tensor) -> None:
        num_edits = [len(edits.token_ids) for _, edits in self._edits]
        all_rows = np.repeat(np.array([row for row, _ in self._edits], dtype=np.int64), num_edits)
        kept, columns = self._columns_of(
            np.concatenate([edits.token_ids for _, edits in self._edits]), logits.shape[-1]
        )
        bias = np.concatenate([edits.bias for _, edits in self._edits])[kept]
        divisor = np.concatenate([edits.divisor for _, edits in self._edits])[kept]
        offset = np.concatenate([edits.offset for _, edits in self._edits])[kept]
        rows, places, added, divisors, offsets = to_device(
            [all_rows[kept], columns, bias, divisor, offset], logits.device
        )
        changed = logits[rows, places] + added
        changed = torch.where(changed > 0, changed / divisors, changed * divisors)
        logits[rows, places] = changed - offsets

    def _apply_forbidden(self, logits: torch.Tensor) -> None:
        all_rows: list[int] = []
        all_columns: list[npt.NDArray[np.int64]] = []
        for row, token_ids in self._forbidden:
            # If every token is a stop token, none can be forbidden.
            if len(token_ids) < logits.shape[-1]:
                _, columns = self._columns_of(np.array(token_ids, dtype=np.int64), logits.shape[-1])
                all_rows += [row] * len(columns)
                all_columns.append(columns)
        if all_rows:
            rows, places = to_device([np.array(all_rows, dtype=np.int64), np.concatenate(all_columns)], logits.device)
            logits.index_put_((rows, places), logits.new_full((), -torch.inf))

    def _columns_of(
        self, token_ids: npt.NDArray[np.int64], num_columns: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Whether each token has a column, and the columns of the tokens that have one."""
        columns = token_ids if self._columns is None else self._columns.of(token_ids)
        kept = (columns >= 0) & (columns < num_columns)
        return kept, columns[kept]

    def _apply_masks(self, logits: torch.Tensor) -> None:
        rows = [row for row, _ in self._masked]
        masks = np.concatenate([mask for _, mask in self._masked])
        if self._columns is None and logits.device.type == "cpu":
            all_masks = np.full((len(logits), masks.shape[1]), -1, dtype=np.int32)
            all_masks[rows] = masks
            xgrammar.apply_token_bitmask_inplace(
                logits, torch.from_numpy(all_masks), vocab_size=logits.shape[-1], indices=rows
            )
            return
        index, words = to_device([np.array(rows, dtype=np.int64), masks], logits.device)
        bits = (words.unsqueeze(-1) >> torch.arange(32, device=logits.device)) & 1
        allowed = bits.flatten(1).bool()
        allowed = allowed[:, : logits.shape[-1]] if self._columns is None else allowed[:, self._columns.vocab]
        logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
