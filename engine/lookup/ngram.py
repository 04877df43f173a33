"""Prompt lookup: when the last tokens occurred earlier in the request, draft what followed them then (Saxena 2023).

Owns one n-gram index per request, extended by committed tokens only, and what may be looked up in the texts of other
requests. Uses no model. The drafts are certain (q is one-hot). Where drafts may branch, a third of the tokens follow an
earlier occurrence that went on otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafter import empty_rows
from engine.core.pacing import MAX_MATCH_LEN, match_class
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Verdict
from engine.lookup.shared_text import SharedText

SHARED_MATCH_LEN = 2
"""Length that a match in another request's text is counted as: it continues as often as a match of this length within
the request."""
BRANCH_SHARE = 3
"""One in so many tokens of a draft goes to the branch."""


class _NgramIndex:
    """Maps each n-gram of one token sequence to the position after its latest occurrence, the sequence end excluded.

    Args:
        sizes: lengths of the n-grams, in tokens.
        keeps_earlier: whether the latest occurrence before with another continuation is kept too.
    """

    def __init__(self, sizes: range, *, keeps_earlier: bool = False) -> None:
        self._sizes = sizes
        self._next_position: dict[tuple[int, ...], int] = {}
        self._other_position: dict[tuple[int, ...], int] = {}
        self._keeps_earlier = keeps_earlier
        self._num_indexed = 0  # n-grams that end before this position are in the index

    def lookup(self, tokens: list[int], k: int) -> tuple[tuple[int, ...], int]:
        """Find the longest suffix that occurred before.

        Returns:
            Up to k tokens that followed its latest occurrence, and the length of the match in tokens; ((), 0) without
            a match.
        """
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    if self._keeps_earlier:
                        before = self._next_position.get(ngram)
                        if before is not None and tokens[before] != tokens[end]:
                            self._other_position[ngram] = before
                    self._next_position[ngram] = end
        self._num_indexed = len(tokens)
        for size in reversed(self._sizes):
            if size <= len(tokens) and (position := self._next_position.get(tuple(tokens[-size:]))) is not None:
                return tuple(tokens[position : position + k]), _match_len(tokens, position, size)
        return (), 0

    def other(self, tokens: list[int], k: int) -> tuple[int, ...]:
        """Up to k tokens that followed the suffix of the latest `lookup` when it was followed by another token."""
        for size in reversed(self._sizes):
            if size <= len(tokens) and (ngram := tuple(tokens[-size:])) in self._next_position:
                position = self._other_position.get(ngram)
                return () if position is None else tuple(tokens[position : position + k])
        return ()


def _with_branch(found: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tree of two paths with as many nodes as `found` has, and its parents; a chain has none.

    Args:
        found: continuation of the latest occurrence.
        other: continuation of another one; its first token differs.
    """
    if not other:
        return found, ()
    num_first = len(found) - len(other)
    parents = (*range(-1, num_first - 1), -1, *range(num_first, len(found) - 1))
    return (*found[:num_first], *other), parents


def _match_len(tokens: list[int], position: int, known: int) -> int:
    """Length of the match before `position`, in tokens: at least `known`, counted up to MAX_MATCH_LEN."""
    while known < min(MAX_MATCH_LEN, position) and tokens[position - known - 1] == tokens[-known - 1]:
        known += 1
    return known


class NgramDrafter:
    """Method `ngram`.

    Args:
        min_size: length of the shortest suffix that is looked up, in tokens.
        max_size: length of the longest suffix that is looked up, in tokens.
        shared: texts of finished requests, which are looked up too where their match is longer; None looks up nothing
            but the request itself.
        per_client: whether a request sees the texts of its own client only. A request without a client sees none.
        branches: whether a draft may have the continuation of a second occurrence beside that of the first.
    """

    def __init__(
        self,
        *,
        min_size: int,
        max_size: int,
        shared: SharedText | None = None,
        per_client: bool = True,
        branches: bool = False,
    ) -> None:
        self._sizes = range(min_size, max_size + 1)
        self._indexes: dict[int, _NgramIndex] = {}
        self._shared = shared
        self._per_client = per_client
        self._branches = branches
        self._groups: dict[str, int] = {}  # client -> group of its texts

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for row_index, span in enumerate(batch.spans):
            if (max_k := span.max_lookup_k) > 0:
                index = self._indexes.get(span.request.key)
                if index is None:
                    index = _NgramIndex(self._sizes, keeps_earlier=self._branches)
                    self._indexes[span.request.key] = index
                found, match_len = index.lookup(span.request.tokens, max_k)
                own_len = match_len
                if self._shared is not None and match_len < MAX_MATCH_LEN:
                    found, match_len = self._longer(span.request, found, match_len, max_k)
                if span.k_by_match is not None:
                    found = found[: span.k_by_match[match_class(match_len)]]
                reason = span.reason if found else "no_match"
                parents: tuple[int, ...] = ()
                if self._branches and match_len == own_len:
                    found, parents = _with_branch(found, index.other(span.request.tokens, len(found) // BRANCH_SHARE))
                rows[row_index] = DraftRow(token_ids=found, reason=reason, match_len=match_len, parents=parents)
        return Draft(tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """Share the output of requests that have ended. An index reads new tokens itself when it is asked again."""
        del verdict
        if self._shared is None:
            return
        for span in batch.spans:
            request = span.request
            if request.finish_reason is not None and (group := self._group(request)) is not None:
                self._shared.add(request.tokens[len(request.submit.prompt) :], group)

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._indexes.pop(key, None)

    def _longer(self, request: Request, found: tuple[int, ...], match_len: int, k: int) -> tuple[tuple[int, ...], int]:
        """The request's own match, or a longer one in the shared texts."""
        group = self._group(request)
        if self._shared is None or group is None:
            return found, match_len
        other = self._shared.find(request.tokens, group, k)
        if other is None or other.match_len <= match_len:
            return found, match_len
        return other.token_ids, SHARED_MATCH_LEN

    def _group(self, request: Request) -> int | None:
        """The group whose texts a request sees and adds to; None for no sharing."""
        if not self._per_client:
            return 0
        client = request.submit.client
        return self._groups.setdefault(client, len(self._groups)) if client else None
