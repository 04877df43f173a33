"""`paceline bench engine`: the engine without Serve and HTTP, and the latency of a draft request."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.engine_only.bare import bare_engine
from bench.engine_only.handoff import measure_handoff
from bench.engine_only.memory import read_bandwidth
from bench.load.client import Run
from bench.load.workload import choose_workload, pick
from deployments.local.weights import model_bytes
from engine.checkpoint.store import EMBEDDED, resolve_model
from engine.config import EngineConfig

WARM_UP_TOKENS = 16


def engine(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the figures as JSON where `--out` is given."""
    console = Console()
    workload = choose_workload(options)
    bandwidth = read_bandwidth()
    folder = resolve_model(EMBEDDED)
    runs: dict[tuple[str, int], list[Run]] = {(form, count): [] for count in options.streams for form in options.packed}
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        engines = {form: stack.enter_context(bare_engine(options.draft, packed=form)) for form in options.packed}
        for turn in range(options.rounds):
            for form, count in runs:
                prompts = pick(workload, max(count * options.per_stream, options.at_least), seed=1000 * count + turn)
                engines[form].load(prompts[:count], streams=count, max_tokens=WARM_UP_TOKENS)
                runs[form, count].append(engines[form].load(prompts, streams=count, max_tokens=options.max_tokens))
        for form, bare in engines.items():
            memory[form] = psutil.Process(bare.process_id).memory_info().rss
    handoffs = {count: measure_handoff(num_rows=count).p50_us() for count in (1, 32)}
    rows = []
    for (form, count), done in runs.items():
        config = EngineConfig.parse({"model": EMBEDDED, "device": "cpu", "packed": form})
        pass_s = model_bytes(config, folder)[0] / bandwidth
        rows.append({"packed": form, "resident_mb": memory[form] // 1_000_000} | _row(count, done, pass_s))
    table = Table(title=f"engine without HTTP, draft {options.draft}; memory reads at {bandwidth / 1e9:.1f} GB/s")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:g}" for value in row.values()))
    console.print(table)
    for count, (there_us, back_us) in handoffs.items():
        console.print(f"handoff p50, {count} rows: to the draft {there_us:.1f} us, back {back_us:.1f} us")
    if options.out is not None:
        about = {"read_bytes_per_s": round(bandwidth), "handoff_p50_us": handoffs, "rows": rows}
        options.out.write_text(json.dumps(about, indent=1) + "\n")
    return 0


def _row(count: int, runs: list[Run], pass_s: float) -> dict[str, Any]:
    """One row of the table.

    Args:
        count: number of streams.
        runs: runs with so many streams.
        pass_s: seconds to read the weights once at the machine's bandwidth.
    """
    tpot_s = statistics.median(run.tpot_p50_s for run in runs)
    return {
        "streams": count,
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "ttft_ms": round(1e3 * statistics.median(run.ttft_p50_s for run in runs), 1),
        "tpot_ms": round(1e3 * tpot_s, 2),
        "roofline": round(pass_s / tpot_s, 3),
    }
