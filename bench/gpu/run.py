"""`paceline bench gpu`: check the GPU path, then measure it, and write one JSON file and one plot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.gpu.drafts import drafts
from bench.gpu.handoff import handoff
from bench.gpu.invariant import invariant
from bench.gpu.lab import Lab
from bench.gpu.ranks import ranks
from bench.gpu.sections import engines, forwards, kernels
from engine.errors import ConfigError
from engine.model.device import gpu_name

SECTIONS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "handoff": handoff,
    "kernels": kernels,
    "forwards": forwards,
    "drafts": drafts,
    "ranks": ranks,
    "invariant": invariant,
    "engines": engines,
}
"""In this order: what is wrong shows before what takes long."""


def gpu(options: argparse.Namespace) -> int:
    """Run every part, print what was found, and write the report. Status 1 if a check failed.

    Raises:
        ConfigError: there is no GPU and this is no dry run, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("bench gpu: matplotlib is not installed; pip install matplotlib")
    if not options.dry_run and not torch.cuda.is_available():
        raise ConfigError("bench gpu: torch sees no GPU here; --dry-run goes through the same code on the CPU")
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    lab = Lab(device, options.dry_run, time.monotonic() + 60 * options.minutes)
    lab = replace(lab, bandwidth=lab.measured_bandwidth())
    report: dict[str, Any] = {
        "device": gpu_name(device) or "cpu",
        "torch": torch.__version__,
        "dry_run": options.dry_run,
        "bandwidth_bytes_per_s": lab.bandwidth,
        "not_measured": {"NCCL": "it refuses two ranks on one device"},
        "parts": {},
    }
    console = Console()
    for name, part in SECTIONS.items():
        report["parts"][name] = _run_part(lab, part)
        console.print(f"{name}: {json.dumps(report['parts'][name])}", soft_wrap=True, highlight=False)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    _plot(report, options.plot)
    console.print(f"wrote {options.out} and {options.plot}")
    return int(any(part["status"] == "failed" for part in report["parts"].values()))


def _run_part(lab: Lab, part: Callable[[Lab], dict[str, Any]]) -> dict[str, Any]:
    """The result of one part; a failure does not keep the others from running."""
    begin = time.monotonic()
    if lab.left_s < 0:
        return {"status": "skipped", "reason": "the time is up"}
    try:
        with torch.inference_mode():
            result = {"status": "ok", **part(lab)}
    except Exception as error:  # noqa: BLE001 - the report is worth more than the rest of the run
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    return result | {"seconds": time.monotonic() - begin}


def _plot(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = report["parts"]["forwards"].get("sizes", [])
    labels = [f"{size['requests']} x {size['q_len']}" for size in sizes]
    for kind in ("eager_s", "graph_s"):
        left.plot(labels, [1e3 * size[kind] for size in sizes], marker="o", label=kind.removesuffix("_s"))
    if sizes:
        left.axhline(1e3 * report["parts"]["forwards"]["floor_s"], color="grey", label="read the weights once")
        left.legend(frameon=False)
    left.set_xlabel("requests x rows")
    left.set_ylabel("ms per forward")
    cells = [cell for cell in report["parts"]["engines"].get("cells", []) if "tokens_per_s" in cell]
    for policy in dict.fromkeys(cell["policy"] for cell in cells):
        mine = [cell for cell in cells if cell["policy"] == policy]
        right.plot([c["streams"] for c in mine], [c["tokens_per_s"] for c in mine], marker="o", label=policy)
    if cells:
        right.set_xscale("log", base=2)
        right.legend(frameon=False)
    right.set_xlabel("streams")
    right.set_ylabel("tokens/s")
    figure.suptitle(f"{report['device']}{', dry run' if report['dry_run'] else ''}")
    figure.savefig(path, dpi=130)
