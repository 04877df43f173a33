"""Prompt lookup: when the last tokens occurred earlier in the request, draft what followed them then (Saxena 2023).

Owns one n-gram index per request, extended by committed tokens only, and what may be looked up in the texts of other
requests. Uses no model. The drafts are certain (q is one-hot). A draft is a chain, the continuation of the latest
occurrence. For trees `Lookup.continuations` gives those of several occurrences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from engine.core.drafter import empty_rows
from engine.core.pacing import MAX_MATCH_LEN, match_class
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Verdict
from engine.lookup.continuations import Continuations, Expected, join
from engine.lookup.shared_text import SharedText

SHARED_MATCH_LEN = 2
"""Length that a match in another request's text is counted as: it continues as often as a match of this length within
the request."""
MAX_OCCURRENCES = 4
"""Latest occurrences of an n-gram whose continuations a tree has."""


class _NgramIndex:
    """Maps each n-gram of one token sequence to the positions after its latest occurrences, the sequence end excluded.

    Args:
        sizes: lengths of the n-grams, in tokens.
        num_kept: occurrences of each n-gram that are kept.
    """

    def __init__(self, sizes: range, num_kept: int) -> None:
        self._sizes = sizes
        self._positions: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._num_before = num_kept - 1  # of the earlier occurrences
        self._num_indexed = 0  # n-grams that end before this position are in the index

    def lookup(self, tokens: list[int]) -> tuple[tuple[int, ...], int]:
        """Find the longest suffix that occurred before.

        Returns:
            The positions after its occurrences, the latest first, and the length of the match of the latest one in
            tokens; ((), 0) without a match.
        """
        before = self._num_before
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    self._positions[ngram] = (end, *self._positions.get(ngram, ())[:before]) if before else (end,)
        self._num_indexed = len(tokens)
        for size in reversed(self._sizes):
            if size <= len(tokens) and (positions := self._positions.get(tuple(tokens[-size:]))) is not None:
                return positions, _match_len(tokens, positions[0], size)
        return (), 0


class Match(Struct, frozen=True, gc=False):
    """How texts went on after the last tokens of a request."""

    continuations: Continuations
    """The tree of these."""
    match_len: int
    """Length of the match in tokens, counted up to MAX_MATCH_LEN; SHARED_MATCH_LEN in another request's text."""
    is_shared: bool
    """Whether the texts are those of other requests."""


def _match_len(tokens: list[int], position: int, known: int) -> int:
    """Length of the match before `position`, in tokens: at least `known`, counted up to MAX_MATCH_LEN."""
    while known < min(MAX_MATCH_LEN, position) and tokens[position - known - 1] == tokens[-known - 1]:
        known += 1
    return known


class Lookup:
    """What the texts of requests say about their next tokens.

    Args:
        min_size: length of the shortest suffix that is looked up, in tokens.
        max_size: length of the longest suffix that is looked up, in tokens.
        shared: texts of finished requests; None looks up nothing but the request itself.
        per_client: whether a request sees the texts of its own client only. A request without a client sees none.
        num_kept: occurrences of an n-gram in a request that are kept.
    """

    def __init__(
        self,
        *,
        min_size: int,
        max_size: int,
        shared: SharedText | None = None,
        per_client: bool = True,
        num_kept: int = MAX_OCCURRENCES,
    ) -> None:
        self._sizes = range(min_size, max_size + 1)
        self._indexes: dict[int, _NgramIndex] = {}
        self._shared = shared
        self._per_client = per_client
        self._num_kept = num_kept
        self._groups: dict[str, int] = {}  # client -> group of its texts

    def latest(self, request: Request, k: int) -> tuple[tuple[int, ...], int]:
        """Up to k tokens that followed the longest match, and its length in tokens; ((), 0) without a match.

        Of several occurrences in the request the latest one counts. A match in the shared texts counts where it is
        longer, and has the length SHARED_MATCH_LEN.
        """
        positions, match_len = self._index(request).lookup(request.tokens)
        found = tuple(request.tokens[positions[0] : positions[0] + k]) if positions else ()
        group = self._group(request)
        if self._shared is None or group is None or match_len >= MAX_MATCH_LEN:
            return found, match_len
        other = self._shared.find(request.tokens, group, k)
        if other is None or other.match_len <= match_len:
            return found, match_len
        return other.token_ids, SHARED_MATCH_LEN

    def continuations(self, request: Request, k: int, expected: Callable[[int, bool], Expected]) -> list[Match]:
        """The continuations in the request itself and in the shared texts, those that there are.

        Args:
            request: whose last tokens are looked up.
            k: most nodes of each tree.
            expected: for a match length and whether the text is shared, what to expect of a node.
        """
        tokens = request.tokens
        matches = []
        positions, match_len = self._index(request).lookup(tokens)
        if positions:
            end = len(tokens)

            def token_at(position: int, ahead: int) -> int:
                return tokens[position + ahead] if position + ahead < end else -1

            matches.append(Match(join(positions, token_at, k, expected(match_len, False)), match_len, False))
        group = self._group(request)
        if self._shared is not None and group is not None:
            found = self._shared.find_all(tokens, group, k, expected(SHARED_MATCH_LEN, True))
            if found is not None:
                matches.append(Match(found, SHARED_MATCH_LEN, True))
        return matches

    def committed(self, batch: Batch) -> None:
        """Share the output of requests that have ended. An index reads new tokens itself when it is asked again."""
        if self._shared is None:
            return
        for span in batch.spans:
            request = span.request
            if request.finish_reason is not None and (group := self._group(request)) is not None:
                self._shared.add(request.tokens[len(request.submit.prompt) :], group)

    def forget(self, keys: Sequence[int]) -> None:
        """Free the indexes of requests that have ended."""
        for key in keys:
            self._indexes.pop(key, None)

    def _index(self, request: Request) -> _NgramIndex:
        index = self._indexes.get(request.key)
        if index is None:
            index = self._indexes[request.key] = _NgramIndex(self._sizes, self._num_kept)
        return index

    def _group(self, request: Request) -> int | None:
        """The group whose texts a request sees and adds to; None for no sharing."""
        if not self._per_client:
            return 0
        client = request.submit.client
        return self._groups.setdefault(client, len(self._groups)) if client else None


class NgramDrafter:
    """Method `ngram`, as chains. The arguments are those of `Lookup`."""

    def __init__(
        self, *, min_size: int, max_size: int, shared: SharedText | None = None, per_client: bool = True
    ) -> None:
        self._lookup = Lookup(min_size=min_size, max_size=max_size, shared=shared, per_client=per_client, num_kept=1)

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for row_index, span in enumerate(batch.spans):
            if (max_k := span.max_lookup_k) > 0:
                found, match_len = self._lookup.latest(span.request, max_k)
                if span.k_by_match is not None:
                    found = found[: span.k_by_match[match_class(match_len)]]
                reason = span.reason if found else "no_match"
                rows[row_index] = DraftRow(token_ids=found, reason=reason, match_len=match_len)
        return Draft(tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        del verdict
        self._lookup.committed(batch)

    def forget(self, keys: Sequence[int]) -> None:
        self._lookup.forget(keys)
