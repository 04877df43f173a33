"""Cost tables of machines: measured once, or derived from a data sheet.

Owns the tables by name, for `paceline simulate` and for tests. A deployment never uses them; it measures its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable


def cpu_table() -> CostTable:
    """SmolLM2-135M in bfloat16 on two cores with a draft of a tenth of a step, rounded from measurements."""
    verify = np.interp(ROW_KNOTS, (1, 6, 16, 32, 96, 512, 2048), (0.0105, 0.0125, 0.021, 0.031, 0.062, 0.25, 1.0))
    passes = np.interp(BATCH_KNOTS, (1, 16, 256), (0.0011, 0.0022, 0.02))
    return CostTable(tuple(verify), tuple(passes), context_s=1e-6, catch_up_s=3e-5, handoff_s=1e-4, overhead_s=5e-4)


def roofline_table(
    *,
    target_bytes: float,
    target_flops_per_token: float,
    draft_bytes: float,
    draft_flops_per_token: float,
    bytes_per_s: float,
    flops_per_s: float,
    kv_bytes_per_token: float,
    launch_s: float = 0.0,
    target_least_s: float = 0.0,
    draft_least_s: float = 0.0,
    exchange_s: float = 0.0,
) -> CostTable:
    """Costs from a data sheet: a forward takes the longest of reading all weights, all arithmetic, and all launches.

    Args:
        target_bytes, draft_bytes: bytes of weights that one device reads in a forward.
        target_flops_per_token, draft_flops_per_token: floating-point operations of one device per token.
        bytes_per_s, flops_per_s: achievable rates of one device, below the advertised ones.
        kv_bytes_per_token: bytes of the target's KV cache on one device per token.
        launch_s: seconds per forward that do not depend on its size.
        target_least_s, draft_least_s: seconds in which the host launches all kernels of a forward. No forward is
            shorter; a longer one hides them.
        exchange_s: seconds per target forward in which the shards exchange activations.
    """

    def forward(size: float, flops: float, least_s: float, rows: int) -> float:
        return launch_s + max(size / bytes_per_s, rows * flops / flops_per_s, least_s)

    return CostTable(
        tuple(exchange_s + forward(target_bytes, target_flops_per_token, target_least_s, rows) for rows in ROW_KNOTS),
        tuple(forward(draft_bytes, draft_flops_per_token, draft_least_s, batch) for batch in BATCH_KNOTS),
        context_s=kv_bytes_per_token / bytes_per_s,
        catch_up_s=draft_flops_per_token / flops_per_s,
        handoff_s=5e-5,
        overhead_s=5e-4,
    )


def h100_llama_70b() -> CostTable:
    """Llama-3-70B in 16 bits on four H100-class devices, with a 1B draft on the first one.

    Per device: a quarter of 140 GB of weights at 70 % of 3.35 TB/s; a quarter of 2 x 70e9 operations per token at 50 %
    of 989 TFLOP/s.
    """
    return roofline_table(
        target_bytes=35e9,
        target_flops_per_token=35e9,
        draft_bytes=2.5e9,
        draft_flops_per_token=2.5e9,
        bytes_per_s=3.35e12 * 0.7,
        flops_per_s=989e12 * 0.5,
        kv_bytes_per_token=80e3,
        launch_s=3e-4,
    )


HARDWARE: dict[str, Callable[[], CostTable]] = {"cpu-smollm2": cpu_table, "h100-llama3-70b": h100_llama_70b}
"""Cost tables by the name that `paceline simulate` takes."""
