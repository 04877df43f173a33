"""Every policy on one simulated load, side by side with an oracle."""

from __future__ import annotations

from autoscale.policy.cost_model import CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import Fixed, Off, Threshold
from autoscale.simulation.simulator import Oracle, Outcome, Simulation, Workload
from engine.core.pacing import Pacer, SpeculationPlan

FIXED_KS = {"off": 0, "fixed 2": 2, "fixed 4": 4, "fixed 8": 8}
FIXED_COLUMNS = tuple(FIXED_KS)
THRESHOLD_K, THRESHOLD_BATCH = 5, 16
"""Largest K and smallest batch without drafts of the policy `threshold`."""


def compare(
    table: CostTable, workload: Workload, *, streams: int, max_k: int, duration_s: float, seed: int
) -> dict[str, Outcome]:
    """Outcome by policy name, and of the oracle under `oracle`.

    Args:
        table: true costs of the hardware; `goodput` starts from it as from a profile at start.
        workload: of every stream.
        streams: number of concurrent requests.
        max_k: upper bound of K for `goodput` and the oracle.
        duration_s: simulated seconds.
        seed: of the random load, which is the same for every policy.
    """
    runs: dict[str, tuple[Pacer, SpeculationPlan]] = {
        name: (Fixed() if k else Off(), SpeculationPlan(policy="fixed", max_k=k)) for name, k in FIXED_KS.items()
    }
    runs["threshold"] = (Threshold(), SpeculationPlan(policy="threshold", max_k=THRESHOLD_K, max_batch=THRESHOLD_BATCH))
    runs["goodput"] = (make_goodput("draft_model", max_k, table), SpeculationPlan(max_k=max_k))
    runs["oracle"] = (Oracle(table, max_k), SpeculationPlan(max_k=max_k))
    return {
        name: Simulation(table, workload, lambda _: streams, seed=seed).run(pacer, plan, duration_s)
        for name, (pacer, plan) in runs.items()
    }
