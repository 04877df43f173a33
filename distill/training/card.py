"""Reports: the table that compares drafts, the plot of the curves, the card in the folder of a draft.

Owns presentation only. Figures come from `evaluate` and `trainer`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from distill.models.costs import StepCosts
from distill.models.export import AnyDraft
from distill.training.evaluate import Acceptance


def table(results: Mapping[str, Mapping[str, Acceptance]], costs: Mapping[str, StepCosts] | None = None) -> Table:
    """Drafts side by side: first-token acceptance and tokens per step by kind of work, by position, and cost."""
    shown = Table(title="acceptance, greedy: first token / tokens per verify step")
    shown.add_column("work")
    for name in results:
        shown.add_column(name, justify="right")
    kinds = sorted({kind for result in results.values() for kind in result} - {"all"})
    for kind in [*kinds, "all"]:
        cells = [f"{r[kind].first:.2f} / {r[kind].tokens_per_step:.2f}" if kind in r else "-" for r in results.values()]
        shown.add_row(kind, *cells, end_section=kind == "all" or kind == kinds[-1])
    total = [result.get("all") for result in results.values()]
    rows: list[tuple[str, Any]] = [
        ("by position, greedy", lambda a: " ".join(f"{v:.2f}" for v in a.per_position)),
        ("by position, sampled", lambda a: " ".join(f"{v:.2f}" for v in a.sampled)),
        ("first token, all positions", lambda a: f"{a.everywhere:.3f}"),
        ("responses", lambda a: str(a.num_responses)),
    ]
    for label, show in rows:
        shown.add_row(label, *[show(a) if a else "-" for a in total])
    if costs:
        shown.add_section()
        shown.add_row("draft step / target step", *[f"{costs[name].draft_share:.1%}" for name in results])
        predicted = [(costs[name], result.get("all")) for name, result in results.items()]
        cells = [f"{cost.speedup(figures.tokens_per_step):.2f}x" if figures else "-" for cost, figures in predicted]
        shown.add_row(f"predicted speed-up, 1 request, K = {next(iter(costs.values())).k}", *cells)
    return shown


def draw_curves(jsonl: Path, png: Path) -> bool:
    """Write a PNG file of loss and acceptance over tokens; False without matplotlib or without curves."""
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = _curves(jsonl)
    if not lines:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    tokens = [line["tokens"] / 1e6 for line in lines]
    left.plot(tokens, [line["loss"] for line in lines])
    left.set(xlabel="million tokens read", ylabel="cross-entropy, nats")
    for step in range(len(lines[0]["hits"])):
        right.plot(tokens, [line["hits"][step] for line in lines], label=f"position {step + 1}")
    right.set(xlabel="million tokens read", ylabel="best token right (training rows)")
    right.legend()
    figure.savefig(png, dpi=120)
    pyplot.close(figure)
    return True


def draft_card(draft: AnyDraft, args: argparse.Namespace, work: Path, result: Mapping[str, Acceptance]) -> str:
    """The README of a draft folder: architecture, options of the run, acceptance."""
    lines = _curves(work / "curves.jsonl")
    read, seconds = (lines[-1]["tokens"], lines[-1]["seconds"]) if lines else (0, 0.0)
    options = {
        k: str(v) for k, v in vars(args).items() if k not in ("run", "action", "out") and v not in (None, [], False)
    }
    noun = "head" if draft.architecture == "medusa" else "layer"
    parameters = sum(p.numel() for p in draft.parameters())
    text = [
        f"# A draft for {args.target}",
        "",
        f"Architecture `{draft.architecture}`, {len(draft.layers)} {noun}(s), {parameters / 1e6:.1f} M parameters "
        f"without the embedding, a head over {len(draft.vocabulary.draft_vocab)} tokens. The token embedding is "
        "that of the target.",
        f"Trained on {read:,} token positions in {seconds / 60:.0f} minutes, on text that the target generated.",
        "",
        "Made by `paceline distill run` with: " + ", ".join(f"{k}={v}" for k, v in sorted(options.items())) + ".",
        "",
    ]
    if result:
        text += [
            "Acceptance on held-out documents (greedy, K = 5):",
            "",
            "| work | first token | tokens per verify step | sampled at 0.8, first token |",
            "|---|---|---|---|",
        ]
    text += [f"| {k} | {a.first:.2f} | {a.tokens_per_step:.2f} | {a.sampled[0]:.2f} |" for k, a in result.items()]
    return "\n".join(text) + "\n"


def _curves(jsonl: Path) -> list[dict[str, Any]]:
    """Lines written in training; none where nothing was trained."""
    return [json.loads(line) for line in jsonl.read_text().splitlines()] if jsonl.exists() else []
