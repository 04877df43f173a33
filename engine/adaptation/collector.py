"""Documents out of draft requests: committed tokens with the target's features at the position before each.

Owns which tokens of which requests are kept until their request ends, and the bound of their memory. The committed
tokens are the target's choices at accepted and at rejected positions alike. Knows nothing of training.

    prompt in the target's prefix cache     no features come for it; those of an earlier request with the same beginning
                                            are taken, because the target computes them from the tokens alone
    a gap (the ring lost a feature)         ends a document and begins another
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.adaptation.messages import Document
from engine.draft.messages import DraftRequestRow

MIN_GENERATED = 4
"""Fewest generated tokens of a document."""
MAX_TOKENS = 2048
"""Most tokens of a document; what follows begins another one."""
_NUM_PREFIXES = 8
"""Prompts whose features are kept for later requests that begin alike."""
_MAX_PREFIX = 1024
"""Most tokens of such a prompt."""


@dataclass(slots=True)
class _Open:
    """A document whose request still runs: `tokens` from `start` on, with the features before all of them but the
    first."""

    start: int
    learn_from: int
    """`DraftRequestRow.learn_from`."""
    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prompt and the features of its tokens."""

    tokens: tuple[int, ...]
    features: torch.Tensor
    """[len(tokens) - 1, width]."""


class Collector:
    """Collects documents. All methods run in one thread.

    Args:
        max_bytes: bound of the features of running requests; a request that would exceed it is not learned from.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[int, _Open] = {}
        self._refused: set[int] = set()
        self._num_bytes = 0
        self._prefixes: deque[_Prefix] = deque(maxlen=_NUM_PREFIXES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the features of running requests."""
        return self._num_bytes

    def observe(self, rows: Sequence[DraftRequestRow], features: torch.Tensor) -> list[Document]:
        """Take the committed tokens of a draft request.

        Args:
            rows: of the draft request.
            features: [ring rows, width] of the target; read before this returns.

        Returns:
            Documents that a gap or their length has ended.
        """
        found: list[Document] = []
        for row in rows:
            if row.learn_from >= 0 and row.new_tokens and row.key not in self._refused:
                self._extend(row, features, found)
        return found

    def release(self, keys: Sequence[int]) -> list[Document]:
        """The documents of requests that have ended."""
        found: list[Document] = []
        for key in keys:
            self._refused.discard(key)
            self._close(key, found)
        return found

    def _extend(self, row: DraftRequestRow, features: torch.Tensor, found: list[Document]) -> None:
        record = self._open.get(row.key)
        # Tokens up to the last one without a feature begin a document anew; before position 0 there is never one.
        gap = max((i for i, place in enumerate(row.feature_rows) if place < 0), default=-1)
        if record is None or record.end != row.start:
            gap = max(gap, 0)  # A new request, or one that is sent from the start again.
        if gap >= 0:
            self._close(row.key, found)
            record = self._open[row.key] = self._begin(row, gap)
        assert record is not None
        places = row.feature_rows[gap + 1 :]
        if places and self._fits(row.key, record, len(places) * features.shape[1] * features.itemsize):
            record.tokens += row.new_tokens[gap + 1 :]
            record.features.append(features.index_select(0, torch.tensor(places)))
            self._keep_prefix(row, record)
        if len(record.tokens) >= MAX_TOKENS:
            self._close(row.key, found)

    def _begin(self, row: DraftRequestRow, gap: int) -> _Open:
        """A document from the token at `gap` on, or from position 0 if the features before it are known."""
        before = row.new_tokens[: gap + 1]
        if row.start == 0 and gap > 0:
            for prefix in self._prefixes:
                if prefix.tokens[: gap + 1] == before:
                    return _Open(0, row.learn_from, list(before), [prefix.features[:gap]])
        return _Open(row.start + gap, row.learn_from, [before[-1]])

    def _fits(self, key: int, record: _Open, num_bytes: int) -> bool:
        """Whether the bound allows so many bytes more. If not, the request is dropped."""
        if self._num_bytes + num_bytes > self._max_bytes:
            self._num_bytes -= record.num_bytes
            self._open.pop(key, None)
            self._refused.add(key)
            return False
        record.num_bytes += num_bytes
        self._num_bytes += num_bytes
        return True

    def _keep_prefix(self, row: DraftRequestRow, record: _Open) -> None:
        """Keep the prompt's features in the moment that the last of them comes."""
        length = row.learn_from
        if record.start > 0 or row.start >= length or not 1 < length <= min(len(record.tokens), _MAX_PREFIX):
            return
        tokens = tuple(record.tokens[:length])
        if all(prefix.tokens != tokens for prefix in self._prefixes):
            self._prefixes.append(_Prefix(tokens, torch.cat(record.features)[: length - 1].clone()))

    def _close(self, key: int, found: list[Document]) -> None:
        """End the document of a request, and keep it if there is enough to learn from."""
        record = self._open.pop(key, None)
        if record is None:
            return
        self._num_bytes -= record.num_bytes
        first_generated = max(record.learn_from - record.start, 1)
        if not record.features or len(record.tokens) - first_generated < MIN_GENERATED:
            return
        features = torch.cat(record.features).contiguous()
        found.append(
            Document(
                tokens=np.array(record.tokens, dtype=np.int32).tobytes(),
                features=features.view(torch.uint8).numpy().tobytes(),
                itemsize=features.itemsize,
                first_generated=first_generated,
            )
        )
