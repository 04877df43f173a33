"""Texts that finished requests generated, in bounded memory, and where each run of a few tokens occurred in them.

Owns a ring of tokens and a hash chain per n-gram, as compressors use them: `heads` has the latest position of each
bucket, `earlier` links it to the ones before. The oldest tokens are overwritten. A text is visible to its own group
only. Knows nothing of requests or drafts. After SuffixDecoding (Oliaro et al. 2024): the longest match with the recent
texts decides, and among several the most frequent continuation.

    tokens    ... a b c d e | a b c d f | ...      one text per request, a separator after each
    earlier         <-------------'                positions after the same ANCHOR tokens
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.lookup.continuations import Continuations, Expected, join

ANCHOR = 4
"""Tokens of the shortest match."""
MAX_MATCH = 16
"""Longest match that is told apart, in tokens."""
MAX_CANDIDATES = 8
"""Positions that one lookup compares, the latest first."""
BYTES_PER_TOKEN = 16
"""Memory of one token of the ring: token, group, link and bucket, of four bytes each."""
_SEPARATOR = -1
_FACTOR = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class Found:
    """The continuation of a match."""

    token_ids: tuple[int, ...]
    match_len: int
    """Tokens before it that are equal, counted up to MAX_MATCH."""


class SharedText:
    """Recent texts of one model.

    Args:
        num_bytes: largest memory; the number of tokens is the largest power of two that fits.

    Raises:
        ValueError: `num_bytes` is too small for 1024 tokens.
    """

    def __init__(self, num_bytes: int) -> None:
        self.capacity = 1 << (max(num_bytes // BYTES_PER_TOKEN, 1).bit_length() - 1)
        if self.capacity < 1024:
            raise ValueError(f"num_bytes: {num_bytes} given, at least {1024 * BYTES_PER_TOKEN} are needed")
        self._mask = self.capacity - 1
        self._next = 0  # position of the next token, counted over all texts
        self._tokens, self._groups, self._earlier, self._heads = (
            array("i", bytes(4 * self.capacity)) for _ in range(4)
        )
        # Links are distances back from a position and heads are positions, both 0 where there is none.

    @property
    def num_bytes(self) -> int:
        """Memory that is in use from the start."""
        return BYTES_PER_TOKEN * self.capacity

    def add(self, tokens: Sequence[int], group: int) -> None:
        """Add a text, at most the last `capacity` / 2 tokens of it.

        Args:
            tokens: at least one; shorter ones than ANCHOR are never found.
            group: number of the texts that see it, at least 0.
        """
        ids = np.array([*tokens[-self.capacity // 2 :], _SEPARATOR], dtype=np.int32)
        start, self._next = self._next, self._next + len(ids)
        if self._next > 1 << 30:
            self._restart()
            start, self._next = 0, len(ids)
        slots = (np.arange(start, start + len(ids)) & self._mask).astype(np.int64)
        np.frombuffer(self._tokens, np.int32)[slots] = ids
        np.frombuffer(self._groups, np.int32)[slots] = group
        if len(ids) > ANCHOR:
            self._link(ids, start, group)

    def find(self, tokens: Sequence[int], group: int, k: int) -> Found | None:
        """The continuation of the longest match of the last tokens.

        Args:
            tokens: a text, whose last tokens are looked up.
            group: number of the texts to search.
            k: most tokens to return, at least 1.

        Returns:
            None where the last ANCHOR tokens did not occur, or only at the end of texts.
        """
        if len(tokens) < ANCHOR:
            return None
        last = tokens[-MAX_MATCH:]
        positions, longest = self._candidates(last, group)
        token_ids = self._continuation(positions, k) if positions else ()
        return Found(token_ids, longest) if token_ids else None

    def find_all(self, tokens: Sequence[int], group: int, k: int, expected: Expected) -> Continuations | None:
        """The continuations of all latest occurrences of the longest match, as one tree.

        Args:
            tokens: a text, whose last tokens are looked up.
            group: number of the texts to search.
            k: most nodes, at least 1.
            expected: what to expect of a node; see `engine.lookup.continuations`.

        Returns:
            None where the last ANCHOR tokens did not occur, or only at the end of texts.
        """
        if len(tokens) < ANCHOR:
            return None
        positions, _ = self._candidates(tokens[-MAX_MATCH:], group)
        found = join(positions, lambda position, ahead: self._tokens[(position + ahead) & self._mask], k, expected)
        return found if found.token_ids else None

    def _candidates(self, last: Sequence[int], group: int) -> tuple[list[int], int]:
        """Positions after the longest matches of `last`, the latest first, and their length."""
        store, mask = self._tokens, self._mask
        oldest = self._next - self.capacity
        position = self._heads[self._bucket(last, group)]
        positions: list[int] = []
        longest = ANCHOR
        for _ in range(MAX_CANDIDATES):
            if position <= max(oldest, 0):
                break
            if self._groups[position & mask] == group:
                length, most = 0, min(len(last), position - max(oldest, 0))
                while length < most and store[(position - 1 - length) & mask] == last[-1 - length]:
                    length += 1
                if length > longest:
                    positions, longest = [position], length
                elif length == longest:
                    positions.append(position)
            link = self._earlier[position & mask]
            if link == 0:
                break
            position -= link
        return positions, longest

    def _continuation(self, positions: list[int], k: int) -> tuple[int, ...]:
        """The most frequent token at each position among the texts that agree so far; the latest wins a tie."""
        found: list[int] = []
        for ahead in range(k):
            following = [self._tokens[(position + ahead) & self._mask] for position in positions]
            token = following[0] if len(following) == 1 else Counter(following).most_common(1)[0][0]
            if token == _SEPARATOR:
                break
            found.append(token)
            positions = [position for position, other in zip(positions, following, strict=True) if other == token]
        return tuple(found)

    def _link(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]], start: int, group: int) -> None:
        """Chain the positions after each ANCHOR tokens of a text into their buckets."""
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], ANCHOR)
        positions = start + ANCHOR + np.arange(len(windows))
        buckets = _hash(windows, group) & self._mask
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_positions = buckets[order], positions[order]
        begins = np.concatenate(([True], sorted_buckets[1:] != sorted_buckets[:-1]))
        heads = np.frombuffer(self._heads, np.int32)
        before = np.where(begins, heads[sorted_buckets], np.concatenate(([0], sorted_positions[:-1])))
        links = np.where(before > max(self._next - self.capacity, 0), sorted_positions - before, 0)
        np.frombuffer(self._earlier, np.int32)[sorted_positions & self._mask] = links
        ends = np.concatenate((begins[1:], [True]))
        heads[sorted_buckets[ends]] = sorted_positions[ends]

    def _bucket(self, last: Sequence[int], group: int) -> int:
        value = group
        for token in last[-ANCHOR:]:
            value = ((value ^ token) * _FACTOR) & 0xFFFFFFFF
            value ^= value >> 15
        return value & self._mask

    def _restart(self) -> None:
        """Forget everything, so that positions stay below 2^31. Once in a billion tokens."""
        for store in (self._tokens, self._groups, self._earlier, self._heads):
            np.frombuffer(store, np.int32)[:] = 0


def _hash(
    windows: np.ndarray[tuple[int, int], np.dtype[np.int32]], group: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[N] hash of each row of [N, ANCHOR] tokens, the one of `SharedText._bucket`."""
    value = np.full(len(windows), group, dtype=np.int64)
    for column in range(ANCHOR):
        value = ((value ^ windows[:, column]) * _FACTOR) & 0xFFFFFFFF
        value ^= value >> 15
    return value
