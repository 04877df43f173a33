"""`paceline bench experts`: the pace on a mixture of experts beside a dense model of the same active size.

Owns the two shapes and the report. More rows of a forward wake more experts, so a drafted row costs more than in a
dense model. The bench shows what the cost model makes of it: its error, the K that goodput chooses, and tokens per
second over those of every fixed K. Weights are random; the draft agrees with the target at a planted rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console

from autoscale.policy.cost_model import ROW_KNOTS, CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from autoscale.profiling.profile import profile_draft, profile_target
from bench.gpu.lab import HUNG_S, Lab
from bench.gpu.planted import SHAPE_DRY, local_drafter, local_link, planted_pair
from bench.gpu.sections import BLOCKS_PER_REQUEST, run_engine
from engine.core.pacing import SpeculationPlan
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner

K = 5
PROFILE_BLOCKS = 40
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""About 190 MB of weights in bfloat16."""
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "mlp_only_layers": [0],
}
"""Two experts of half the size for each token, out of 16. The draft, which is the lowest layer, has none."""
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, SHAPE_DRY),
    "experts": (EXPERTS, SHAPE_DRY | {"model_type": "qwen3_moe", "mlp_only_layers": [0]} | _TINY_EXPERTS),
}
"""By name: the measured shape and that of a dry run."""


def experts(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the figures as JSON where `--out` is given. Returns the exit status 0."""
    device = torch.device("cuda:0" if torch.cuda.is_available() and not options.dry_run else "cpu")
    lab = Lab(device, options.dry_run, time.monotonic() + 3600.0)
    console = Console()
    rows = []
    with torch.inference_mode():
        for name, (real, dry) in SHAPES.items():
            target, draft = planted_pair(lab, shape=lab.pick(real, dry), scale=options.scale)
            table = cost_table(lab, target)
            added = ", ".join(
                f"{rows}: {1e3 * value:.1f}" for rows, value in zip(ROW_KNOTS, table.verify_s, strict=True)
            )
            console.print(f"{name}: ms of a forward by rows: {added}", soft_wrap=True)
            for streams in options.streams:
                rows.append(measure(lab, name, target, draft, table, streams=streams, rounds=options.rounds))
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[each if isinstance(each, str) else f"{each:.3g}" for each in row.values()] for row in rows]
    console.print("\n".join("| " + " | ".join(line) + " |" for line in lines), soft_wrap=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def cost_table(lab: Lab, target: Decoder) -> CostTable:
    """The costs of a target, timed as a deployment times them at start."""
    runner = ModelRunner(target, num_blocks=PROFILE_BLOCKS, block_size=lab.block_size)
    return profile_target(
        runner.forward,
        block_size=lab.block_size,
        num_blocks=PROFILE_BLOCKS,
        max_rows=lab.pick(512, 16),
        max_spans=lab.pick(32, 4),
        vocab_size=target.config.vocab_size,
    )


def measure(
    lab: Lab, name: str, target: Decoder, draft: Decoder, table: CostTable, *, streams: int, rounds: int
) -> dict[str, Any]:
    """Figures of one model: each fixed K and goodput in turns; the pacer of each learns from its own steps."""
    num_blocks = 1 + BLOCKS_PER_REQUEST * streams
    runner = ModelRunner(target, num_blocks=num_blocks, block_size=lab.block_size)
    link = local_link(lab, draft, num_blocks=num_blocks, max_rows=streams, max_k=K)
    table = profile_draft(partial(link.ask, deadline_s=HUNG_S), table, max_rows=streams, max_k=K)
    drafter = local_drafter(link, max_rows=streams)
    plans = {k: SpeculationPlan(policy="fixed", max_k=k) for k in range(1, K + 1)}
    plans |= {0: SpeculationPlan(policy="off", max_k=0), -1: SpeculationPlan(policy="goodput", max_k=K)}
    goodputs = {k: make_goodput("draft_model", K, table) for k in plans}
    runs: dict[int, list[dict[str, Any]]] = {k: [] for k in plans}
    for turn in range(1 + rounds):
        for k, plan in plans.items():
            pacer = PolicyPacer(goodputs[k])
            cell, _ = run_engine(lab, runner.forward, drafter, pacer, plan, streams=streams, num_blocks=num_blocks)
            runs[k] += [cell] if turn else []  # The first turn warms up, and acceptance is learned.
    rates = {k: statistics.median(cell["tokens_per_s"] for cell in cells) for k, cells in runs.items()}
    fixed = {k: rate for k, rate in rates.items() if k >= 0}
    best = max(fixed, key=lambda k: fixed[k])
    p50, p95 = goodputs[-1].cost.error()
    return {
        "model": name,
        "streams": streams,
        "acceptance": statistics.fmean(cell["acceptance"] for cell in runs[K]),
        "K of goodput": statistics.fmean(cell["mean_k"] for cell in runs[-1]),
        "best fixed K": best,
        "goodput / best fixed": rates[-1] / fixed[best],
        "goodput / off": rates[-1] / rates[0],
        f"fixed {K} / off": rates[K] / rates[0],
        "cost error p50": p50,
        "cost error p95": p95,
    }
