"""Label values and histogram buckets of the metrics.

Owns the lists only. Durations are in seconds.
"""

from __future__ import annotations

from typing import Literal, get_args

from engine.core.step import KReason

Phase = Literal["schedule", "draft", "handoff", "verify", "sample"]
SwitchCause = Literal["gain", "acceptance", "batch", "plan", "draft_down", "draft_up"]
"""Why drafting was switched on or off.

    gain        on: drafting increases goodput
    acceptance  off: the target accepts too few draft tokens
    batch       off: the batch is too large
    plan        either: the plan's policy, bounds or `enabled` changed
    draft_down  off: the draft was lost
    draft_up    on: the draft came back
"""

ScalingReason = Literal["steady", "slow", "queue", "spare", "unreachable", "no_data", "fixed"]
"""Why the autoscaling policy wants its number of replicas.

    steady       the objective is met
    slow         the time per output token is above the objective
    queue        requests wait
    spare        fewer replicas meet the objective
    unreachable  no number of replicas meets the objective; the nearest is wanted
    no_data      nothing has been measured yet
    fixed        the number is set by hand
"""

COMMON_LABELS = ("app", "replica", "model")
"""Labels of every series."""
K_REASONS: tuple[str, ...] = get_args(KReason)
PHASES: tuple[str, ...] = get_args(Phase)
SWITCH_CAUSES: tuple[str, ...] = get_args(SwitchCause)
CACHES = ("target", "draft")
FINISH_REASONS = ("stop", "length", "abort", "error")
SCALING_REASONS: tuple[str, ...] = get_args(ScalingReason)
REJECT_CAUSES = ("queue_full", "unavailable", "rate_limit", "unauthorized", "invalid_request")

STEP_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKEN_BUCKETS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
K_BUCKETS = tuple(float(k) for k in range(17))
BATCH_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
