"""Which numbers of draft passes a choice compares: all of them now and then, else the last one and a neighbour.

Owns only the turns. The best depth moves slowly, so one neighbour per choice follows it.
"""

from __future__ import annotations

WIDE_SEARCH_CHOICES = 4
"""All depths are compared in every so many choices, and whenever the batch has changed."""


class DepthSearch:
    """The turns of one engine.

    `allocate` takes longer with each depth: at 32 requests about 26 us over eight and 14 us over two (one x86 core,
    best of 1,500).
    """

    def __init__(self) -> None:
        self._num_choices = 0
        self._depth = 1

    def is_wide(self, *, same_batch: bool) -> bool:
        """Begin a choice; returns whether it compares all depths."""
        self._num_choices += 1
        return not same_batch or self._num_choices % WIDE_SEARCH_CHOICES == 0

    def depths(self, max_k: int, *, is_wide: bool) -> range:
        """The depths to compare, within [1, max_k]: all, or the depth found last and one neighbour of it in turns."""
        if is_wide:
            return range(1, max_k + 1)
        depth = min(max_k, self._depth)
        if self._num_choices % 2:
            return range(max(1, depth - 1), depth + 1)
        return range(depth, min(max_k, depth + 1) + 1)

    def found(self, depth: int) -> None:
        """Note the best depth of this choice; 0 counts as 1."""
        self._depth = max(1, depth)
