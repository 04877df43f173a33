"""Options of `paceline bench ...`. What the actions do is in `bench.actions`, imported when one runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

STREAMS = (1, 4, 16, 32)


def add_bench_parser(subparsers: Any) -> None:
    """Add `bench` and its actions to a command's subparsers."""
    bench = subparsers.add_parser("bench", help="measure policies or peers side by side on this machine")
    actions = bench.add_subparsers(required=True, metavar="ACTION")
    pace = actions.add_parser("pace", help="policies against each other on one server", parents=[_common()])
    pace.add_argument("--draft", default="ngram", help="ngram, or folder or id of a draft model")
    pace.add_argument(
        "--policies",
        nargs="+",
        default=["none", "off", "fixed-2", "fixed-4", "threshold", "goodput"],
        metavar="NAME",
        help="of none (a server without a draft), off, fixed-K, threshold, goodput; the first is the baseline",
    )
    pace.set_defaults(run=_run("pace"))
    peers = actions.add_parser("peers", help="Paceline against other servers, those installed", parents=[_common()])
    peers.add_argument("--draft", default=None, help="Paceline's draft (default: that of the deployment file)")
    peers.add_argument("--vllm-python", type=Path, default=Path("vllm/bin/python"), metavar="PATH")
    peers.add_argument("--llama-server", type=Path, default=Path("llama-server"), metavar="PATH")
    peers.set_defaults(run=_run("peers"))


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    common.add_argument("--rounds", type=int, default=3, help="alternating rounds; medians count")
    common.add_argument("--per-stream", type=int, default=3, metavar="N", help="requests per stream and round")
    common.add_argument("--max-tokens", type=int, default=128)
    common.add_argument(
        "--workload", nargs="+", default=["chat"], help="chat, chat-0.7, chat-1.0, code, schema, schema-0.7, schema-1.0"
    )
    common.add_argument("--prompts", type=Path, help="prompt file (JSON lines) instead of a built-in workload")
    common.add_argument("--categories", nargs="*", metavar="NAME", help="categories of the prompt file, each by itself")
    common.add_argument("--out", type=Path, help="write the figures as JSON lines")
    return common


def _run(name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        from bench import actions

        status: int = getattr(actions, name)(options)
        return status

    return run
