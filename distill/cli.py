"""`paceline distill`: generate, train, measure and write, in this order.

Owns the folder of the command: `work/data` (shards), `work/train` (checkpoint, curves, the draft's vocabulary) and the
draft. Options are in `options`; the other modules do the work.
"""

from __future__ import annotations

import argparse
import json
import signal
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distill.data import corpus
from distill.data.generate import Generator, Job
from distill.data.prompts import Prompt, prompts
from distill.data.shards import Shard, ShardWriter, held_out, shard_paths, token_mass
from distill.data.sources import collect, is_prose
from distill.models.costs import StepCosts, measure
from distill.models.decoder import FrozenTarget, fingerprint
from distill.models.draft_model import SmallDraft
from distill.models.eagle3 import Eagle3Draft
from distill.models.export import (
    AnyDraft,
    DraftMismatchError,
    export_draft,
    load_draft,
    make_feature_draft,
    read_config,
    read_tensors,
    start_from,
)
from distill.models.medusa import MedusaDraft, check_last_layer, tapped_layers
from distill.models.parallel import ParallelDraft
from distill.settings import NUM_HEADS, Objective, TrainConfig, check_architecture, trained_steps
from distill.training.card import draft_card, draw_curves, table
from distill.training.evaluate import Acceptance, evaluate
from distill.training.trainer import train
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.public_draft import default_feature_layers
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError
from engine.model.load import Model, load_model


def run_distill(args: argparse.Namespace) -> int:
    """Generate missing data, train up to the budget, measure and write the draft; returns the exit status."""
    console = Console(stderr=True)
    check_architecture(
        args.architecture, heads=args.heads, parallel=args.parallel, mask_only=args.mask_only, int8=args.int8
    )
    is_public = args.architecture == Eagle3Draft.architecture
    folder, target = _open_target(args, args.feature_layers or (_public_features(args) if is_public else None))
    data, work = args.out / "work" / "data", args.out / "work" / "train"
    generate_corpus(args, folder, target.feature_layers, data, console)
    held = held_out(data, args.hold_out)
    draft = new_draft(args, target, data, work)
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
    if held:
        console.print(table({args.out.name: result}))
    export_draft(draft, folder, args.out, card=draft_card(draft, args, work, result), int8=args.int8)
    console.print(f"draft written to {args.out}")
    return 0


def run_generate(args: argparse.Namespace) -> int:
    """Generate data; returns the exit status. SIGTERM and Ctrl-C end it after finished documents are saved."""
    folder = resolve_model(args.target)
    layers = args.feature_layers or default_features(folder)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        generate_corpus(args, folder, layers, args.out / "work" / "data", Console(stderr=True))
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Compare drafts on a prompt file; returns the exit status."""
    tapped = tapped_layers([read_config(path) for path in args.drafts])
    if len(tapped) > 1:
        raise ConfigError(f"drafts: they read different layers, {tapped}; compare drafts with equal layers")
    folder, target = _open_target(args, tapped[0] if tapped else None)
    shards = responses_to(args, folder, target.feature_layers)
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
    args: argparse.Namespace, folder: Path, layers: tuple[int, ...], data: Path, console: Console
) -> None:
    """Fill `data` up to `args.generate` tokens over all streams."""
    num_tokens = args.generate - sum(len(Shard.open(path).tokens) for path in shard_paths([data]))
    if num_tokens <= 0:
        return
    tokenizer = load_tokenizer(folder)
    chat = corpus.ChatFormat.of(tokenizer)
    model = _open_model(args, folder, layers)
    meta = {"feature_layers": list(model.feature_layers), **fingerprint(folder)}
    writer = ShardWriter(data, args.stream, meta, shard_tokens=max(min(num_tokens // 8, 32_768), 1024))
    seed = zlib.crc32(f"{args.seed} {args.stream} {writer.next_index}".encode())
    generator = Generator(model, num_slots=args.slots, max_len=args.max_len, stop_token=chat.stop, seed=seed)
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
        made: Iterator[Prompt] = prompts(collect(seed=args.seed, extra=_own_passages(args, tokenizer)), seed)
        given = corpus.responses(chat, tokenizer, made, seed, max_response=args.max_len // 2)
    own = corpus.self_chat(chat, seed, max_response=args.max_len // 2)
    if args.text:
        yield from corpus.plain_text(args.text, tokenizer, args.max_len)
    mixed = corpus.mixed([(args.chat_share, own), (1 - args.chat_share, given)], seed)
    yield from corpus.by_length(mixed, *args.prompt_range) if args.prompt_range else mixed


def _own_passages(args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """Paragraphs of earlier token rows, repeated several times: general prose in addition to technical manuals."""
    if args.rows is None:
        return []
    texts = (text for row in np.load(args.rows) for text in tokenizer.decode(row).split("\n\n"))
    return [text for text in texts if len(text.split()) > 25 and is_prose(text)] * 6


def new_draft(args: argparse.Namespace, target: FrozenTarget, data: Path, work: Path) -> AnyDraft:
    """An initialised draft over the tokens with the largest probability mass in `data` at the start of training.

    With `mask_only` it keeps those of the draft that it starts from: the head does not train, and knows no others.
    """
    chosen = work / "draft_vocab.npy"
    if not chosen.exists():
        work.mkdir(parents=True, exist_ok=True)
        if args.mask_only and args.start_from is not None:
            ids = read_tensors(args.start_from)["draft_vocab"]
        else:
            mass = token_mass(shard_paths([data]), target.config.vocab_size)
            ids = mass.topk(min(args.draft_vocab, target.config.vocab_size)).indices.sort().values
        np.save(chosen, ids.numpy())
    vocab = torch.from_numpy(np.load(chosen))
    draft: AnyDraft
    if args.architecture in ("eagle", "eagle3"):
        draft = make_feature_draft(
            args.architecture,
            target.config,
            target.feature_layers,
            vocab,
            target.embed,
            num_layers=args.layers or 1,
            positions=args.parallel or 1,
        )
    elif args.architecture == MedusaDraft.architecture:
        check_last_layer(target, shard_paths([data]))
        sizes = {"num_heads": args.heads or NUM_HEADS, "num_layers": args.layers or 1}
        draft = MedusaDraft(target.config, vocab, target.final_norm, **sizes)
    else:
        draft = SmallDraft(target.config, vocab, target.embed, num_layers=args.layers or 3)
    if args.start_from is None:
        draft.initialise(target, layers=args.from_layers)
    else:
        try:
            start_from(draft, args.start_from, target)
        except DraftMismatchError as error:
            raise ConfigError(str(error)) from None
    if isinstance(draft, ParallelDraft) and args.mask_only:
        draft.freeze_shared()
    return draft.to(target.device)


def responses_to(args: argparse.Namespace, folder: Path, layers: tuple[int, ...]) -> list[Path]:
    """Shards with the target's responses to `args.prompts`: greedy ones, and sampled ones to every second prompt."""
    done = shard_paths([args.answers])
    if done:
        return done
    tokenizer = load_tokenizer(folder)
    chat = corpus.ChatFormat.of(tokenizer)
    items = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    given_prompts = [
        (item.get("category", "prompt"), tuple(item.get("turns") or [item["prompt"]])[:1]) for item in items
    ]
    jobs: list[Job] = []
    for suffix, temperature, chosen in (("", 0.0, given_prompts), ("@sampled", args.temperature, given_prompts[::2])):
        given = (Prompt(kind + suffix, turns) for kind, turns in chosen)
        jobs += corpus.responses(chat, tokenizer, given, 0, max_response=args.max_answer, temperatures=(temperature,))
    longest = max(len(job.prompt) for job in jobs) + args.max_answer
    writer = ShardWriter(args.answers, "answers", fingerprint(folder), shard_tokens=1 << 62)
    model = _open_model(args, folder, layers)
    generator = Generator(model, num_slots=24, max_len=longest, stop_token=chat.stop, seed=0)
    corpus.fill(generator, iter(jobs), writer)
    return shard_paths([args.answers])


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The options as a `TrainConfig`."""
    objective = Objective(args.kl_weight, args.ce_weight, args.temperature, args.feature_weight)
    return replace(
        TrainConfig(),
        steps=trained_steps(args.architecture, heads=args.heads, parallel=args.parallel, unroll=args.unroll),
        chain_every=args.chain_every,
        cooldown_s=args.cooldown * 60,
        row_len=args.row_len,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        muon=not args.adamw,
        muon_lr=args.muon_lr,
        budget_tokens=args.tokens,
        constant=args.constant,
        average=args.average,
        prompt_weight=args.prompt_weight,
        time_s=None if args.time is None else args.time * 60,
        seed=args.seed,
        objective=objective,
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, local files only, no remote code."""
    from transformers import AutoTokenizer  # imported here, because it takes seconds

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def default_features(folder: Path) -> tuple[int, ...]:
    """A low, a middle and the last layer of the target: (4, 14, 29) of 30."""
    num_layers = ModelConfig.load(folder).num_layers
    return tuple(sorted({max(num_layers * 2 // 15, 0), max(num_layers // 2 - 1, 0), num_layers - 1}))


def _public_features(args: argparse.Namespace) -> tuple[int, ...]:
    """The layers that EAGLE-3 heads read by default. Not every engine can tap the last layer."""
    return default_feature_layers(ModelConfig.load(resolve_model(args.target)).num_layers)


def _open_target(args: argparse.Namespace, layers: tuple[int, ...] | None) -> tuple[Path, FrozenTarget]:
    """The frozen target for training: weights to start from, and the cost of a step."""
    folder = resolve_model(args.target)
    device, dtype = _placed(args)
    try:
        return folder, FrozenTarget(
            folder, feature_layers=layers or default_features(folder), device=device, dtype=dtype
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _open_model(args: argparse.Namespace, folder: Path, layers: tuple[int, ...]) -> Model:
    """The target with the forward that serves, for generating data."""
    device, dtype = _placed(args)
    return load_model(folder, device=device, dtype=dtype, feature_layers=tuple(sorted(layers)))


def _placed(args: argparse.Namespace) -> tuple[str, torch.dtype]:
    """Device and compute type. Also sets the number of threads of this process."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    return device, torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"))
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console
    )
