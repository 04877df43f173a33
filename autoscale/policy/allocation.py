"""Which requests get how many draft tokens: the allocation of highest predicted goodput, as one pure function.

Goodput of a step is expected tokens over expected seconds,

    (B + sum of S_ij over drafted positions) / (base + fixed + passes * pass_s + added(n))

where S_ij is the probability that the target accepts request i's draft up to and including position j, and n is the
number of drafted positions. A chain needs a pass for each position, a parallel draft one pass for many. S falls with j.
So the best n positions for a given number of passes are the n largest S, and they are always a prefix of each
request's positions. The cost of added rows is read from the cost curve at each n, not approximated by one slope,
because the best batch often ends exactly at a kink of the curve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Allocation:
    """K for each request, and the tokens and seconds predicted for the step."""

    ks: npt.NDArray[np.int64]
    """[B] Draft tokens of each request."""
    tokens: float
    """Expected number of tokens that the step emits."""
    seconds: float
    """Expected duration of the step in seconds."""

    @property
    def goodput(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds

    @property
    def depth(self) -> int:
        """The largest K: the number of draft passes of a chain."""
        return max(self.ks.tolist(), default=0)


def allocate(
    cumulative_acceptance: Floats,
    *,
    base_s: float,
    fixed_s: float,
    pass_s: float,
    added_s: Floats,
    depths: Iterable[int],
    positions_per_pass: int = 1,
) -> Allocation:
    """Return the allocation of highest goodput; all zeros when drafting does not pay.

    Args:
        cumulative_acceptance: [B, K] probability that a draft is accepted up to and including each position. Each row
            must not increase.
        base_s: seconds of the step without drafts.
        fixed_s: seconds added once if anything is drafted.
        pass_s: seconds of one draft pass.
        added_s: [B * K + 1] seconds that n more rows cost the target, for n from 0 on.
        depths: largest K to consider, at least one, each within [1, K].
        positions_per_pass: tokens that one pass drafts: 1 for a chain, more for a parallel draft.
    """
    batch = len(cumulative_acceptance)
    candidates = sorted(depths, reverse=True)
    deepest = candidates[0]
    passes_s = np.array([base_s + fixed_s + -(-depth // positions_per_pass) * pass_s for depth in candidates])
    # One sort serves every candidate: a shallower one leaves out the positions behind its depth.
    flat = cumulative_acceptance[:, :deepest].ravel()
    order = flat.argsort()[::-1]
    is_within = order % deepest < np.array(candidates)[:, None]  # [depths, B * deepest]
    # An entry that leaves its position out repeats the entry before it. With none before it, it pays for a pass without
    # a draft, which is no better than the step without drafts. So neither is ever chosen.
    tokens = np.add.accumulate(is_within * flat[order], axis=1)
    tokens += batch
    seconds = added_s[np.add.accumulate(is_within, axis=1, dtype=np.intp)]
    seconds += passes_s[:, None]
    goodput = tokens / seconds
    depth_index, last = divmod(int(goodput.argmax()), flat.size)
    best = float(goodput[depth_index, last])
    if best <= batch / base_s:
        return Allocation(np.zeros(batch, dtype=np.int64), float(batch), base_s)
    drafted = order[: last + 1][is_within[depth_index, : last + 1]]
    most_tokens = float(tokens[depth_index, last])
    return Allocation(np.bincount(drafted // deepest, minlength=batch), most_tokens, most_tokens / best)
