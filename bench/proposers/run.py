"""`paceline bench proposers`: tokens per step, share of drafting and speed of every proposer, alone and merged.

Variants take turns on the same prompts, in rounds of alternating order, so that ratios are those of one machine at one
time. What a variant learns is kept from run to run, as in a server. Greedy requests give the same tokens under every
variant; how many of them do is counted.

Other processes only add time. So a step counts with the lower quartile of the durations that the variant's steps of the
same kind had, and so does its drafting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load.workload import pick, read
from bench.proposers.local import Bench, Seen, open_bench
from bench.proposers.variants import Variant, parse_variant
from deployments.cluster.actors import device_env
from deployments.cluster.drafts import resolve_draft
from deployments.text.tokenizer import TextCodec
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.store import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import SamplingParams
from engine.threads import threads_per_shard


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps that take the same time but for what else the machine does."""

    rows: int
    """Rows of the target's forward."""
    model_depth: int
    """Levels of the deepest draft where a model drafted; 0 where none did."""


@dataclass(slots=True)
class Cell:
    """Sums of one variant on one kind of work at one number of streams."""

    kind: str
    streams: int
    variant: str
    emitted: int = 0
    """Tokens of steps without prompts."""
    request_steps: int = 0
    """Requests in those steps: verifications."""
    drafted: int = 0
    accepted: int = 0
    step_s: float = 0.0
    """Seconds of those steps, as they were."""
    usual_s: float = 0.0
    """The same with the usual duration of each step. Set by `settle`."""
    draft_s: float = 0.0
    """Seconds of drafting, usual ones. Set by `settle`."""
    same: int = 0
    """Prompts whose tokens are those of the variant that ran first."""
    prompts: int = 0
    steps: list[tuple[StepKind, float, float]] = field(default_factory=list)
    """Kind of each step, its seconds and its seconds of drafting."""

    def add(self, seen: Seen) -> None:
        """Add a run. Steps with prompts are left out: their time is that of the prompts."""
        for step, draft_s in zip(seen.stats, seen.draft_s, strict=True):
            if step.num_prefill_tokens == 0:
                self.emitted += step.num_emitted
                self.request_steps += step.num_decodes
                self.drafted += step.num_drafted
                self.accepted += step.num_accepted
                self.step_s += step.step_s
                kind = StepKind(step.num_rows, step.depth if step.draft_s > 0 else 0)
                self.steps.append((kind, step.step_s, draft_s))

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and verification."""
        return self.emitted / max(1, self.request_steps)

    @property
    def draft_share(self) -> float:
        """Share of the time of a step that drafting takes."""
        return self.draft_s / self.usual_s if self.usual_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of usual step time."""
        return self.emitted / self.usual_s if self.usual_s else 0.0


def settle(cells: Sequence[Cell]) -> None:
    """Set the usual durations of cells of one variant and one number of streams."""
    by_kind: dict[StepKind, tuple[list[float], list[float]]] = {}
    for cell in cells:
        for kind, step_s, draft_s in cell.steps:
            for seconds, value in zip(by_kind.setdefault(kind, ([], [])), (step_s, draft_s), strict=True):
                seconds.append(value)
    usual = {kind: tuple(sorted(seconds)[len(seconds) // 4] for seconds in both) for kind, both in by_kind.items()}
    for cell in cells:
        cell.usual_s = sum(usual[kind][0] for kind, *_ in cell.steps)
        cell.draft_s = sum(usual[kind][1] for kind, *_ in cell.steps)


def proposers(options: argparse.Namespace) -> int:
    """Measure, print a table per number of streams, and write the cells as JSON where `--out` is given."""
    console = Console()
    folder = resolve_model(options.model)
    drafts = {}
    for given in options.drafts:
        name, _, where = given.rpartition("=")
        draft_folder = resolve_draft(where)
        method = check_draft(draft_folder, folder).architecture
        drafts[name or method] = (method, draft_folder)
    variants = [parse_variant(name, drafts) for name in options.variants]
    codec = TextCodec.from_folder(folder)
    texts = {kind: pick(read(options.prompts, category=kind), options.per_kind, seed=1) for kind in options.kinds}
    prompts = {
        kind: [codec.encode_chat([{"role": "user", "content": text}]) for text in kind_texts]
        for kind, kind_texts in texts.items()
    }
    eos = tuple(codec.eos_token_ids)
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, stop_token_ids=eos)
    draft_folders = {name: path for name, (_, path) in drafts.items()}
    cells = _in_a_process(options, folder, draft_folders, variants, prompts, sampling)
    for streams in options.streams:
        for variant in variants:
            settle([cell for cell in cells if (cell.streams, cell.variant) == (streams, variant.name)])
        console.print(f"\n{streams} streams: tokens per step (share of drafting; tokens/s over {variants[0].name})")
        console.print(table(cells, streams), soft_wrap=True, markup=False)
        same, number = sum(cell.same for cell in cells), sum(cell.prompts for cell in cells)
        console.print(f"{same} of {number} responses have the tokens of the variant that ran first")
    if options.out is not None:
        options.out.write_text(
            json.dumps([asdict(cell) | {"steps": len(cell.steps)} for cell in cells], indent=1) + "\n"
        )
    return 0


def _in_a_process(options: argparse.Namespace, *arguments: Any) -> list[Cell]:
    """`_measure` in a process with the environment that a shard has in a deployment: threads that wait do not spin."""
    config = EngineConfig.parse({"model": options.model, "device": "cpu"})
    os.environ.update(device_env(threads_per_shard(config)))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        plain = argparse.Namespace(**{name: value for name, value in vars(options).items() if name != "run"})
        return pool.submit(_measure, plain, *arguments).result()


def _measure(
    options: argparse.Namespace,
    folder: Path,
    draft_folders: dict[str, Path],
    variants: Sequence[Variant],
    prompts: dict[str, list[tuple[int, ...]]],
    sampling: SamplingParams,
) -> list[Cell]:
    cells = {
        (kind, streams, variant.name): Cell(kind, streams, variant.name)
        for streams in options.streams
        for kind in prompts
        for variant in variants
    }
    settings = {"model": options.model, "device": "cpu", "kv_cache_tokens": options.kv_cache_tokens}
    names: list[str | None] = [*dict.fromkeys(variant.draft for variant in variants if variant.draft)] or [None]
    with contextlib.ExitStack() as stack:
        benches: dict[str | None, Bench] = {
            name: stack.enter_context(open_bench(settings, folder, draft_folders[name] if name else None))
            for name in names
        }
        benches[None] = benches.get(None) or benches[names[0]]
        for variant in variants:  # Costs are timed before the prefix cache holds anything.
            benches[variant.draft].prepare(variant)
        for number in range(options.rounds + options.warm_up):
            order = variants if number % 2 == 0 else variants[::-1]
            for streams in options.streams:
                for kind, kind_prompts in prompts.items():
                    first: Seen | None = None
                    for variant in order:
                        seen = benches[variant.draft].run(variant, kind_prompts, sampling, streams=streams)
                        if number < options.warm_up:
                            continue
                        first = first or seen
                        cell = cells[kind, streams, variant.name]
                        cell.add(seen)
                        cell.prompts += len(kind_prompts)
                        cell.same += sum(a == b for a, b in zip(seen.tokens, first.tokens, strict=True))
    return list(cells.values())


def table(cells: Sequence[Cell], streams: int) -> str:
    """A Markdown table: one row per variant, one column per kind of work, and one for all of them."""
    mine = [cell for cell in cells if cell.streams == streams]
    kinds = list(dict.fromkeys(cell.kind for cell in mine))
    names = list(dict.fromkeys(cell.variant for cell in mine))
    if not kinds:
        raise ConfigError("--kinds: none given")
    found = {(cell.kind, cell.variant): cell for cell in mine}
    lines = ["| proposer | " + " | ".join([*kinds, "all"]) + " |", "|---" * (len(kinds) + 2) + "|"]
    for name in names:
        row = [found[kind, name] for kind in kinds]
        base = [found[kind, names[0]] for kind in kinds]
        entries = [_entry([cell], [first]) for cell, first in zip(row, base, strict=True)]
        lines.append(f"| {name} | " + " | ".join([*entries, _entry(row, base)]) + " |")
    return "\n".join(lines)


def _entry(cells: Sequence[Cell], base: Sequence[Cell]) -> str:
    whole, first = Cell("", 0, ""), Cell("", 0, "")
    for total, parts in ((whole, cells), (first, base)):
        for part in parts:
            total.emitted += part.emitted
            total.request_steps += part.request_steps
            total.usual_s += part.usual_s
            total.draft_s += part.draft_s
    gain = whole.tokens_per_s / first.tokens_per_s if first.tokens_per_s else 0.0
    return f"{whole.tokens_per_step:.2f} ({100 * whole.draft_share:.0f} %; {gain:.2f})"
