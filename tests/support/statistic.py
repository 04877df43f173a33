"""Whether counted outcomes follow an exact distribution: the chi-square statistic of the sampling tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import chi2

Outcome = tuple[int, ...]


def chi_square(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom. Outcomes of small expectation are pooled; an impossible one gives infinity."""
    total = sum(counts.values())
    if any(distribution.get(outcome, 0.0) == 0 for outcome in counts):
        return float("inf"), 1
    cells = [(mass * total, counts.get(outcome, 0)) for outcome, mass in distribution.items() if mass > 0]
    big = [cell for cell in cells if cell[0] >= 8]
    rest = [cell for cell in cells if cell[0] < 8]
    if rest:
        big.append((sum(cell[0] for cell in rest), sum(cell[1] for cell in rest)))
    expected, observed = (np.array(column, dtype=float) for column in zip(*big, strict=True))
    return float(((observed - expected) ** 2 / expected).sum()), len(big) - 1


def p_value(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> float:
    """Probability of a statistic at least this large, if the outcomes follow the distribution."""
    statistic, degrees = chi_square(counts, distribution)
    return float(chi2.sf(statistic, degrees)) if degrees else float(statistic < 1e-6)


def joint_p_value(pairs: list[tuple[Mapping[Outcome, int], Mapping[Outcome, float]]]) -> float:
    """The same probability for many independent samples at once; detects a small bias that they share."""
    parts = [chi_square(counts, distribution) for counts, distribution in pairs]
    return float(chi2.sf(sum(statistic for statistic, _ in parts), sum(degrees for _, degrees in parts)))
