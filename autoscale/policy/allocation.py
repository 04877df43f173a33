"""Which requests get how many draft tokens: the allocation of highest predicted goodput, as one pure function.

Goodput of a step is expected tokens over expected seconds,

    (B + sum of S_ij over drafted positions) / (base + fixed + passes * pass_s + added(n))

with S_ij the probability that request i's draft stands up to position j and n the number of drafted positions. As S
falls with j, the best n positions for a given number of passes are the n largest S, and every such choice drafts a
request's positions in order. Rows are priced by the curve itself, because the best batch often ends exactly at one of
its kinks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Allocation:
    """K for each request, with what it is expected to give."""

    ks: npt.NDArray[np.int64]
    """[B]"""
    tokens: float
    """Expected tokens of the step."""
    seconds: float
    """Expected duration of the step."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def depth(self) -> int:
        """Draft passes."""
        return int(self.ks.max(initial=0))


def allocate(
    cumulative_acceptance: Floats,
    *,
    base_s: float,
    fixed_s: float,
    pass_s: float,
    added_s: Floats,
    depths: Iterable[int],
) -> Allocation:
    """The best K for each request.

    Args:
        survival: [B, K], falling along each row.
        base_s: the step without drafts, seconds.
        fixed_s: once, if anything is drafted at all.
        pass_s: per draft pass.
        added_s: [B * K + 1] what n more rows cost the target, seconds, from n = 0 on.
        depths: numbers of passes to consider, within [1, K].

    Returns:
        All zeros when drafting does not pay.
    """
    batch = len(cumulative_acceptance)
    best, best_n, best_order = batch / base_s, -1, None
    tokens = float(batch)
    candidates = sorted(depths, reverse=True)
    # Sorted once for the deepest candidate; a shallower one leaves out what lies behind its depth.
    deepest = candidates[0]
    flat = cumulative_acceptance[:, :deepest].ravel()
    order = flat.argsort()[::-1]
    columns = order % deepest
    for depth in candidates:
        if depth < deepest:
            inside = columns < depth
            order, columns = order[inside], columns[inside]
        expected = flat[order].cumsum()
        expected += batch
        ratio = expected / (added_s[1 : len(order) + 1] + (base_s + fixed_s + depth * pass_s))
        n = int(ratio.argmax())
        if ratio[n] > best:
            best, best_n, best_order = float(ratio[n]), n, order
            tokens = float(expected[n])
    if best_order is None:
        return Allocation(np.zeros(batch, dtype=np.int64), tokens, base_s)
    ks = np.bincount(best_order[: best_n + 1] // deepest, minlength=batch)
    return Allocation(ks, tokens, tokens / best)
