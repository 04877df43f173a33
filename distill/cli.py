"""`paceline distill` and `paceline distill eval`: options, and the order of generating, training, measuring, writing.

Owns the command's options and its folder (`data/`, `train/`, the draft itself). The work is done by the other modules.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distill import corpus
from distill.card import draft_card, draw_curves, table
from distill.costs import StepCosts, measure
from distill.data import ShardWriter, shard_paths, token_mass
from distill.decoder import FrozenTarget, fingerprint
from distill.draft import SmallDraft
from distill.eagle import EagleDraft
from distill.evaluate import Acceptance, evaluate
from distill.export import DraftMismatchError, export_draft, load_draft
from distill.generate import Generator, Job
from distill.losses import Objective
from distill.prompts import Prompt, prompts
from distill.sources import collect
from distill.trainer import TrainConfig, train
from engine.errors import ConfigError
from engine.model_store import resolve_model

HELD_OUT = 1
"""Shards of each stream that are never trained on; acceptance on them is the curves' honest twin."""


def add_distill_parser(subparsers: Any) -> None:
    """Add `distill TARGET` and `distill-eval`'s twin `distill eval` to an argparse `add_subparsers` object."""
    parser = subparsers.add_parser("distill", help="make a draft from a target, or `distill eval` drafts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_run(actions.add_parser("run", help="generate, train and write a draft"))
    _add_eval(actions.add_parser("eval", help="acceptance of drafts on a prompt file"))


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="target: folder, Hugging Face id, or smollm2")
    add("--out", type=Path, required=True, metavar="DIR", help="draft folder; work lies in DIR/work and is resumed")
    add("--architecture", choices=("eagle", "draft_model"), default="eagle")
    add("--layers", type=int, default=None, metavar="N", help="decoder layers (eagle: 1, draft_model: 3)")
    add("--from-layers", type=_integers, default=None, metavar="A,B", help="target layers to initialise from")
    add(
        "--feature-layers",
        type=_integers,
        default=None,
        metavar="A,B,C",
        help="eagle: tapped layers (low, middle, last)",
    )
    add("--draft-vocab", type=int, default=8192, metavar="N", help="tokens the draft scores")
    add("--prompts", type=Path, metavar="JSONL", help="prompts or logged conversations instead of made ones")
    add("--text", type=Path, nargs="*", default=[], metavar="FILE", help="plain text to learn the target's laws over")
    add("--chat-share", type=float, default=0.3, metavar="F", help="share of the target's own chat among the jobs")
    add("--generate", type=int, default=2_000_000, metavar="TOKENS", help="tokens to generate before training")
    add("--max-len", type=int, default=480, metavar="TOKENS", help="longest document")
    add("--slots", type=int, default=96, help="documents written at once")
    add("--tokens", type=int, default=6_000_000, help="training budget, token positions")
    add("--time", type=float, default=None, metavar="MIN", help="training time at most; run again to continue")
    add("--unroll", type=int, default=4, help="chain steps seen in training")
    add("--lr", type=float, default=TrainConfig.lr)
    add("--muon-lr", type=float, default=TrainConfig.muon_lr)
    add("--adamw", action="store_true", help="AdamW for all weights instead of Muon for the matrices")
    add("--batch-tokens", type=int, default=TrainConfig.batch_tokens)
    add("--row-len", type=int, default=TrainConfig.row_len)
    add("--kl-weight", type=float, default=Objective.kl_weight)
    add("--ce-weight", type=float, default=Objective.ce_weight)
    add("--temperature", type=float, default=Objective.temperature, help="softens the target's law in the KL part")
    add("--feature-weight", type=float, default=Objective.feature_weight, help="eagle: weight of feature regression")
    add("--int8", action="store_true", help="store matrices as int8 rows")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=None, help="CPU threads")
    parser.set_defaults(run=run_distill)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="target: folder, Hugging Face id, or smollm2")
    add("drafts", type=Path, nargs="+", help="draft folders to compare")
    add("--prompts", type=Path, required=True, metavar="JSONL", help="prompt file; `category` groups its lines")
    add("--answers", type=Path, required=True, metavar="DIR", help="cache of the target's answers to them")
    add("--max-answer", type=int, default=128, metavar="TOKENS")
    add("--k", type=int, default=5)
    add("--temperature", type=float, default=0.8, help="of the sampled figures")
    add("--every", type=int, default=1, metavar="N", help="use each N-th prompt only")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures here too")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=None, help="CPU threads")
    parser.set_defaults(run=run_eval)


def run_distill(args: argparse.Namespace) -> int:
    """Generate what is missing, train what is left of the budget, measure, write the draft; returns the exit status."""
    console = Console(stderr=True)
    folder, target = _open_target(args, args.feature_layers)
    data, work = args.out / "work" / "data", args.out / "work" / "train"
    have = sum(json.loads((path / "meta.json").read_text())["num_tokens"] for path in shard_paths([data]))
    if have < args.generate:
        generate_corpus(args, folder, target, data, args.generate - have, console)
    held = held_out(data)
    if not held:
        raise ConfigError(f"generate: {args.generate} tokens made too few shards to hold one out; generate more")
    draft = new_draft(args, target, data)
    config = train_config(args)
    with _bar(console) as bar:
        task = bar.add_task("training", total=config.budget_tokens, note="")
        train(
            draft,
            [data],
            work,
            config,
            skip=frozenset(path.name for path in held),
            compute_dtype=target.dtype,
            report_tokens=max(config.budget_tokens // 200, 1000),
            report=lambda line: bar.update(
                task,
                completed=line.tokens,
                note=f"loss {line.loss:.3f}, accepted {' '.join(f'{h:.2f}' for h in line.hits)}",
            ),
        )
    draw_curves(work / "curves.jsonl", work / "curves.png")
    result = evaluate(draft, held, k=5)
    console.print(table({args.out.name: result}))
    export_draft(draft, folder, args.out, card=draft_card(draft, args, work, result), int8=args.int8)
    console.print(f"draft written to {args.out}")
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Compare drafts on a prompt file; returns the exit status."""
    layers = {tuple(json.loads((path / "config.json").read_text()).get("feature_layers", ())) for path in args.drafts}
    tapped = sorted(layers - {()})
    if len(tapped) > 1:
        raise ConfigError(f"drafts: they tap different layers, {tapped}; compare those with equal layers")
    folder, target = _open_target(args, tapped[0] if tapped else None)
    shards = answers_to(args, folder, target)
    results: dict[str, dict[str, Acceptance]] = {}
    costs: dict[str, StepCosts] = {}
    for path in args.drafts:
        try:
            draft = load_draft(path, target)
        except DraftMismatchError as error:
            raise ConfigError(f"{path}: {error}") from None
        draft.to(target.device, target.dtype)
        results[path.name] = evaluate(draft, shards, k=args.k, temperature=args.temperature, every=args.every)
        costs[path.name] = measure(target, draft, args.k)
    Console(width=150).print(table(results, costs))
    if args.json is not None:
        args.json.write_text(json.dumps(results, default=vars, indent=1))
    return 0


def generate_corpus(
    args: argparse.Namespace, folder: Path, target: FrozenTarget, data: Path, num_tokens: int, console: Console
) -> None:
    """Fill `data` with `num_tokens` more tokens."""
    tokenizer = load_tokenizer(folder)
    chat = corpus.ChatFormat.of(tokenizer)
    meta = {"feature_layers": list(target.feature_layers), **fingerprint(folder)}
    writer = ShardWriter(data, "made", meta, shard_tokens=max(min(num_tokens // 8, 65_536), 1024))
    seed = args.seed * 100_003 + writer.next_index
    generator = Generator(target, num_slots=args.slots, max_len=args.max_len, stop_token=chat.stop, seed=seed)
    with _bar(console) as bar:
        task = bar.add_task("generating", total=num_tokens, note="")
        corpus.fill(
            generator,
            _jobs(args, chat, tokenizer, seed),
            writer,
            num_tokens=num_tokens,
            report=lambda done, s: bar.update(task, completed=done, note=f"{done / max(s, 1e-9):.0f} tokens/s"),
        )


def _jobs(args: argparse.Namespace, chat: corpus.ChatFormat, tokenizer: Any, seed: int) -> Iterator[Job]:
    if args.prompts is not None:
        given: Iterator[Job] = corpus.repeated(
            lambda number: corpus.logged(args.prompts, chat, tokenizer, seed + number)
        )
    else:
        made: Iterator[Prompt] = prompts(collect(seed=args.seed), seed)
        given = corpus.answers(chat, tokenizer, made, seed, max_answer=args.max_len // 2)
    own = corpus.self_chat(chat, seed, max_answer=args.max_len // 2)
    if args.text:
        yield from corpus.plain_text(args.text, tokenizer, args.max_len)
    yield from corpus.mixed([(args.chat_share, own), (1 - args.chat_share, given)], seed)


def new_draft(args: argparse.Namespace, target: FrozenTarget, data: Path) -> EagleDraft | SmallDraft:
    """An initialised draft over the tokens that carry most of the target's mass in `data`."""
    mass = token_mass(shard_paths([data]), target.config.vocab_size)
    vocab = mass.topk(min(args.draft_vocab, target.config.vocab_size)).indices.sort().values
    draft: EagleDraft | SmallDraft
    if args.architecture == "eagle":
        draft = EagleDraft(target.config, target.feature_layers, vocab, target.embed, num_layers=args.layers or 1)
    else:
        draft = SmallDraft(target.config, vocab, target.embed, num_layers=args.layers or 3)
    draft.initialise(target, layers=args.from_layers)
    return draft.to(target.device)


def answers_to(args: argparse.Namespace, folder: Path, target: FrozenTarget) -> list[Path]:
    """Shards with the target's answers to `args.prompts`: greedy ones, and sampled ones to each second prompt."""
    done = shard_paths([args.answers])
    if done:
        return done
    tokenizer = load_tokenizer(folder)
    chat = corpus.ChatFormat.of(tokenizer)
    items = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    asked = [(item.get("category", "prompt"), tuple(item.get("turns") or [item["prompt"]])[:1]) for item in items]
    jobs: list[Job] = []
    for suffix, temperature, chosen in (("", 0.0, asked), ("@sampled", args.temperature, asked[::2])):
        given = (Prompt(kind + suffix, turns) for kind, turns in chosen)
        jobs += corpus.answers(chat, tokenizer, given, 0, max_answer=args.max_answer, temperatures=(temperature,))
    longest = max(len(job.prompt) for job in jobs) + args.max_answer
    writer = ShardWriter(args.answers, "answers", fingerprint(folder), shard_tokens=1 << 62)
    generator = Generator(target, num_slots=24, max_len=longest, stop_token=chat.stop, seed=0)
    corpus.fill(generator, iter(jobs), writer)
    return shard_paths([args.answers])


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The options as a `TrainConfig`."""
    objective = Objective(args.kl_weight, args.ce_weight, args.temperature, args.feature_weight)
    return replace(
        TrainConfig(),
        steps=args.unroll if args.architecture == "eagle" else 1,
        row_len=args.row_len,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        muon=not args.adamw,
        muon_lr=args.muon_lr,
        budget_tokens=args.tokens,
        time_s=None if args.time is None else args.time * 60,
        seed=args.seed,
        objective=objective,
    )


def held_out(data: Path) -> list[Path]:
    """The first shards of each stream, if there are others to train on."""
    paths = shard_paths([data])
    streams = {path.name.rsplit("-", 1)[0] for path in paths}
    held = [path for path in paths if int(path.name.rsplit("-", 1)[1]) < HELD_OUT]
    return held if len(paths) > len(streams) * HELD_OUT else []


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, local files only, no remote code."""
    from transformers import AutoTokenizer  # seconds that `--help` should not cost

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def default_features(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and the last layer: (4, 14, 29) of 30."""
    return tuple(sorted({max(num_layers * 2 // 15, 0), max(num_layers // 2 - 1, 0), num_layers - 1}))


def _open_target(args: argparse.Namespace, layers: tuple[int, ...] | None) -> tuple[Path, FrozenTarget]:
    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve_model(args.target)
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    try:
        return folder, FrozenTarget(
            folder, feature_layers=layers or default_features(count), device=device, dtype=dtype
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"))
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console
    )
