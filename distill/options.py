"""Options of `paceline distill run`, `generate` and `eval`.

Owns names, defaults and help texts only. What the actions do is in `cli`, which is imported when one runs, because it
costs seconds that `--help` should not.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distill.settings import Objective, TrainConfig


def add_distill_parser(subparsers: Any) -> None:
    """Add `distill` with its three actions to an argparse `add_subparsers` object; actions set `run`."""
    parser = subparsers.add_parser("distill", help="make a draft that imitates a target, and measure drafts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="generate what is missing, train, measure and write a draft")
    _add_common(run)
    _add_data(run)
    _add_training(run)
    run.set_defaults(run=_run("run_distill"))
    generate = actions.add_parser("generate", help="only generate, for instance in several processes at once")
    _add_common(generate)
    _add_data(generate)
    generate.set_defaults(run=_run("run_generate"))
    compare = actions.add_parser("eval", help="acceptance and predicted speed-up of drafts on a prompt file")
    _add_common(compare)
    _add_eval(compare)
    compare.set_defaults(run=_run("run_eval"))


def _run(name: str) -> Any:
    def run(args: argparse.Namespace) -> int:
        from distill import cli

        status: int = getattr(cli, name)(args)
        return status

    return run


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="target: folder, Hugging Face id, or smollm2")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of computing")
    add("--threads", type=int, default=None, help="CPU threads")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="draft folder; work lies in DIR/work and is resumed")
    add("--feature-layers", type=_integers, default=None, metavar="A,B,C", help="tapped layers: low, middle, last")
    add("--prompts", type=Path, metavar="JSONL", help="prompts or logged conversations instead of made ones")
    add("--text", type=Path, nargs="*", default=[], metavar="FILE", help="plain text to learn the target's laws over")
    add("--rows", type=Path, default=None, metavar="NPY", help="token rows the target wrote: more passages")
    add("--chat-share", type=float, default=0.3, metavar="F", help="share of the target's own chat among the jobs")
    add("--generate", type=int, default=2_000_000, metavar="TOKENS", help="tokens wanted in all")
    add("--stream", default="made", metavar="NAME", help="prefix of the shards written by this process")
    add("--prompt-range", type=_integers, default=None, metavar="LOW,HIGH", help="use prompts of this many tokens only")
    add("--max-len", type=int, default=480, metavar="TOKENS", help="longest document")
    add("--slots", type=int, default=96, help="documents written at once")
    add("--seed", type=int, default=0)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--architecture", choices=("eagle", "draft_model"), default="eagle")
    add("--layers", type=int, default=None, metavar="N", help="decoder layers (eagle: 1, draft_model: 3)")
    add("--from-layers", type=_integers, default=None, metavar="A,B", help="target layers to initialise from")
    add("--start-from", type=Path, default=None, metavar="DRAFT", help="train an earlier draft further, on new data")
    add("--draft-vocab", type=int, default=8_192, metavar="N", help="tokens the draft scores")
    add("--tokens", type=int, default=6_000_000, help="training budget, token positions")
    add("--time", type=float, default=None, metavar="MIN", help="training time at most; run again to continue")
    add("--unroll", type=int, default=3, help="chain steps seen in training")
    add("--chain-every", type=int, default=TrainConfig.chain_every, help="roots per chain beyond its first step")
    add("--cooldown", type=float, default=0.0, metavar="MIN", help="with --time: the rate falls over the last minutes")
    add("--lr", type=float, default=TrainConfig.lr, help="AdamW's rate, of norms and (halved) of the head")
    add("--muon-lr", type=float, default=TrainConfig.muon_lr, help="Muon's rate, of the other matrices")
    add("--adamw", action="store_true", help="AdamW for all weights")
    add("--average", type=float, default=TrainConfig.average, metavar="DECAY", help="of the running mean of weights")
    add("--batch-tokens", type=int, default=TrainConfig.batch_tokens)
    add("--constant", action="store_true", help="hold the rate after the warm-up: for runs that go on as data grow")
    add("--hold-out", type=int, default=1, metavar="N", help="shards per stream kept for measuring; 0 is none")
    add("--row-len", type=int, default=TrainConfig.row_len)
    add("--prompt-weight", type=float, default=TrainConfig.prompt_weight, help="loss weight of given tokens")
    add("--kl-weight", type=float, default=Objective.kl_weight)
    add("--ce-weight", type=float, default=Objective.ce_weight)
    add("--temperature", type=float, default=Objective.temperature, help="softens the target's law in the KL part")
    add("--feature-weight", type=float, default=Objective.feature_weight, help="eagle: weight of feature regression")
    add("--int8", action="store_true", help="store matrices as int8 rows")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafts", type=Path, nargs="+", help="draft folders to compare")
    add("--prompts", type=Path, required=True, metavar="JSONL", help="prompt file; `category` groups its lines")
    add("--answers", type=Path, required=True, metavar="DIR", help="cache of the target's answers to them")
    add("--max-answer", type=int, default=128, metavar="TOKENS")
    add("--k", type=int, default=5)
    add("--temperature", type=float, default=0.8, help="of the sampled figures")
    add("--every", type=int, default=1, metavar="N", help="use each N-th prompt only")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures here too")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 4,14,29") from None
