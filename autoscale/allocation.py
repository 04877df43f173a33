"""Which requests get how many draft tokens: the allocation of highest predicted goodput, as one pure function.

Goodput of a step is expected tokens over expected seconds,

    sum_i (1 + S_i1 + ... + S_ik_i)  /  (t_0 + passes(max k) + row_s * sum k_i)

with S_ij the probability that request i's draft stands up to position j. S falls with j, so for a given price of a
second (lam, tokens per second) a token pays exactly when S_ij >= lam * row_s, and a further pass pays when the surplus
of all tokens in it exceeds lam * pass_s. Dinkelbach's method finds the lam that is the goodput itself; a good first
guess needs one or two rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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


def allocate(
    survival: npt.NDArray[np.float64],
    *,
    base_s: float,
    fixed_s: float,
    pass_s: float,
    row_s: float,
    first_guess: float,
    max_rounds: int = 4,
) -> Allocation:
    """The best K for each request.

    Args:
        survival: [B, K], non-increasing in each row.
        base_s: the step without drafts, seconds.
        fixed_s: once, if anything is drafted at all.
        pass_s: per draft pass.
        row_s: per row that the target verifies in addition.
        first_guess: of the goodput, tokens per second; close is fast.

    Returns:
        All zeros when drafting does not pay.
    """
    batch, width = survival.shape
    nothing = Allocation(np.zeros(batch, dtype=np.int64), float(batch), base_s)
    if width == 0:
        return nothing
    lam = max(first_guess, nothing.goodput)
    best = nothing
    for _ in range(max_rounds):
        surplus = survival - lam * row_s
        pays = surplus > 0
        gain = np.add.accumulate(np.add.reduce(np.where(pays, surplus, 0.0), axis=0) - lam * pass_s)
        depth = int(gain.argmax()) + 1
        if gain[depth - 1] <= 0:
            chosen = nothing
        else:
            kept = pays[:, :depth]
            ks = np.add.reduce(kept, axis=1, dtype=np.int64)
            tokens = batch + float(survival[:, :depth][kept].sum())
            seconds = base_s + fixed_s + pass_s * depth + row_s * float(ks.sum())
            chosen = Allocation(ks, tokens, seconds)
        if chosen.goodput > best.goodput:
            best = chosen
        if abs(chosen.goodput - lam) <= 0.005 * lam:
            break
        lam = max(chosen.goodput, nothing.goodput)
    return best
