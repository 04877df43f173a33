"""How many tokens a finished step was expected to emit, from the acceptance estimates before that step."""

from __future__ import annotations

import numpy as np

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.lookup_k import LookupK
from engine.core.stats import StepStats
from engine.core.step import DraftSource
from engine.messages import WorkloadClass


def expected_tokens(stats: StepStats, acceptance: Acceptance, lookup: LookupK | None) -> float:
    """One token per decoding request, and the mean number of accepted tokens of each draft.

    Args:
        stats: of the step.
        acceptance: of the draft method.
        lookup: of prompt lookup drafts that are asked before the method; None where that is not done.
    """
    tokens = float(stats.num_decodes)
    # Accepted tokens to expect of a draft by its length, from 0 on.
    by_class: dict[tuple[WorkloadClass, str, DraftSource, int], list[float]] = {}
    for outcome in stats.outcomes:
        draft_class = (outcome.workload, outcome.adapter, outcome.source, outcome.match_len)
        if draft_class not in by_class:
            used = acceptance
            if lookup is not None and outcome.source in ("lookup", "merged"):
                used = lookup.acceptance_of(outcome.match_len)
            rates = used.by_position(outcome.workload, outcome.adapter)
            by_class[draft_class] = [0.0, *np.cumprod(rates).cumsum().tolist()]
        by_k = by_class[draft_class]
        tokens += by_k[min(outcome.num_drafted, len(by_k) - 1)]
    return tokens
