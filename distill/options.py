"""Options of `paceline distill run`, `generate` and `eval`.

Owns names, defaults and help texts only. The actions are in `cli`, which is imported when one runs, because that takes
seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distill.settings import Objective, TrainConfig


def add_distill_parser(subparsers: Any) -> None:
    """Add `distill` and its actions to the subparsers of a command. Each action sets `run`."""
    parser = subparsers.add_parser("distill", help="train a draft for a target, and measure drafts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="generate missing data, train, measure and write a draft")
    _add_common(run)
    _add_data(run)
    _add_training(run)
    run.set_defaults(run=_run("run_distill"))
    generate = actions.add_parser("generate", help="generate data only, for example in several processes")
    _add_common(generate)
    _add_data(generate)
    generate.set_defaults(run=_run("run_generate"))
    compare = actions.add_parser("eval", help="acceptance and predicted speed-up of drafts on a prompt file")
    _add_common(compare)
    _add_eval(compare)
    compare.set_defaults(run=_run("run_eval"))
    export = actions.add_parser("export", help="write an eagle draft as an EAGLE-3 head that other engines load")
    _add_export(export)
    export.set_defaults(run=_export)


def _run(name: str) -> Any:
    def run(args: argparse.Namespace) -> int:
        from distill import cli

        status: int = getattr(cli, name)(args)
        return status

    return run


def _export(args: argparse.Namespace) -> int:
    from distill.convert import run_export

    return run_export(args)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="target: folder, Hugging Face id, or smollm2")
    add("draft", type=Path, help="folder of the draft")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write the head to")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the stored tensors")


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="target: folder, Hugging Face id, or smollm2")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute type")
    add("--threads", type=int, default=None, help="CPU threads")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="draft folder; DIR/work holds the state of the run, which is resumed",
    )
    add(
        "--feature-layers",
        type=_integers,
        default=None,
        metavar="A,B,C",
        help="target layers whose outputs the draft reads (default: a low, a middle and the last one)",
    )
    add("--prompts", type=Path, metavar="JSONL", help="prompts or logged conversations instead of built-in ones")
    add(
        "--text",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="plain text over which the target's distributions are learned",
    )
    add(
        "--rows",
        type=Path,
        default=None,
        metavar="NPY",
        help="token rows that the target generated, as further passages",
    )
    add(
        "--chat-share", type=float, default=0.3, metavar="F", help="share of jobs in which the target chats with itself"
    )
    add("--generate", type=int, default=2_000_000, metavar="TOKENS", help="total number of tokens to generate")
    add("--stream", default="made", metavar="NAME", help="prefix of the shards written by this process")
    add(
        "--prompt-range",
        type=_integers,
        default=None,
        metavar="LOW,HIGH",
        help="use only prompts with a number of tokens in this range",
    )
    add("--max-len", type=int, default=480, metavar="TOKENS", help="length of the longest document")
    add("--slots", type=int, default=96, help="documents generated concurrently")
    add("--seed", type=int, default=0)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--architecture",
        choices=("eagle", "eagle3", "draft_model", "medusa"),
        default="eagle",
        help="eagle3: the public EAGLE-3 layout, which other engines load",
    )
    add("--heads", type=int, default=None, metavar="N", help="medusa: number of heads, the largest K (default: 5)")
    add(
        "--parallel",
        type=int,
        default=None,
        metavar="K",
        help="eagle: one forward drafts all tokens, up to K; replaces --unroll",
    )
    add(
        "--mask-only",
        action="store_true",
        help="parallel: train only what masked positions use alone; vocabulary and first token: of --start-from",
    )
    add("--layers", type=int, default=None, metavar="N", help="layers (eagle, eagle3, medusa: 1, draft_model: 3)")
    add("--from-layers", type=_integers, default=None, metavar="A,B", help="target layers to initialise from")
    add(
        "--start-from",
        type=Path,
        default=None,
        metavar="DRAFT",
        help="continue the training of an earlier draft on new data",
    )
    add("--draft-vocab", type=int, default=8_192, metavar="N", help="size of the draft's output vocabulary")
    add("--tokens", type=int, default=6_000_000, help="training budget in token positions")
    add(
        "--time",
        type=float,
        default=None,
        metavar="MIN",
        help="upper bound of the training time; run again to continue",
    )
    add("--unroll", type=int, default=3, help="number of chain steps in training")
    add(
        "--chain-every",
        type=int,
        default=TrainConfig.chain_every,
        help="unroll later chain steps from every N-th position only",
    )
    add(
        "--cooldown",
        type=float,
        default=0.0,
        metavar="MIN",
        help="minutes at the end of --time over which the learning rate falls to zero",
    )
    add("--lr", type=float, default=TrainConfig.lr, help="learning rate of AdamW, for norms and (halved) for the head")
    add("--muon-lr", type=float, default=TrainConfig.muon_lr, help="learning rate of Muon, for the other matrices")
    add("--adamw", action="store_true", help="train all weights with AdamW")
    add(
        "--average",
        type=float,
        default=TrainConfig.average,
        metavar="DECAY",
        help="decay of the running average of weights",
    )
    add("--batch-tokens", type=int, default=TrainConfig.batch_tokens)
    add("--constant", action="store_true", help="keep the learning rate constant after the warm-up")
    add("--hold-out", type=int, default=1, metavar="N", help="shards per stream that are held out for measuring")
    add("--row-len", type=int, default=TrainConfig.row_len)
    add(
        "--prompt-weight",
        type=float,
        default=TrainConfig.prompt_weight,
        help="loss weight of tokens that the target did not generate",
    )
    add("--kl-weight", type=float, default=Objective.kl_weight)
    add("--ce-weight", type=float, default=Objective.ce_weight)
    add(
        "--temperature",
        type=float,
        default=Objective.temperature,
        help="temperature of the target's distribution in the KL part",
    )
    add("--feature-weight", type=float, default=Objective.feature_weight, help="eagle: weight of feature regression")
    add("--int8", action="store_true", help="store matrices as int8 rows")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafts", type=Path, nargs="+", help="draft folders to compare")
    add("--prompts", type=Path, required=True, metavar="JSONL", help="prompt file; `category` groups its lines")
    add("--answers", type=Path, required=True, metavar="DIR", help="cache of the target's responses to the prompts")
    add("--max-answer", type=int, default=128, metavar="TOKENS")
    add("--k", type=int, default=5)
    add("--temperature", type=float, default=0.8, help="temperature of the sampled figures")
    add("--every", type=int, default=1, metavar="N", help="use every N-th prompt only")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures as JSON")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 4,14,29") from None
