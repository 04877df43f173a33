"""Options of `paceline bench ...`. The modules that measure are imported when one runs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STREAMS = (1, 4, 16, 32)
"""Default numbers of streams."""
PEER_STREAMS = (1, 2, 4, 8, 16, 32)
"""Default numbers of streams for `peers` and `engine`."""
PROPOSERS = (
    *("off", "ngram@5", "ngram+tree@8", "shared@5", "eagle@5", "eagle+tree@8", "eagle+ngram@5", "eagle+ngram+tree@8"),
    "eagle+shared+tree@8",
)
"""Default variants for `proposers`."""


def add_bench_parser(subparsers: Any) -> None:
    """Add `bench` and its actions to the subparsers of a command. Each action sets `run`."""
    bench = subparsers.add_parser("bench", help="measure policies or peers side by side on this machine")
    actions = bench.add_subparsers(required=True, metavar="ACTION")
    _add_pace(actions)
    _add_peers(actions)
    _add_engine(actions)
    _add_soak(actions)
    _add_proposers(actions)
    _add_proxy(actions)
    _add_gpu(actions)
    _add_experts(actions)
    _add_adaptation(actions)


def _add_adaptation(actions: Any) -> None:
    adaptation = actions.add_parser(
        "adaptation",
        help="a draft that learns from one narrow workload: its acceptance over time, and its price",
        description="Orders in free text are turned into JSON of one schema, one request after the other with pauses. "
        "Tokens per verify step over time with adaptation, then on the same prompts without. With --price: time per "
        "step and to the first token of neighbours with and without, on one server.",
    )
    adaptation.add_argument("--requests", type=int, default=400, metavar="N")
    adaptation.add_argument("--rows", type=int, default=8, metavar="N", help="rows of the table, of equal size")
    adaptation.add_argument("--pause", type=float, default=1.0, metavar="S", help="seconds between two requests")
    adaptation.add_argument("--max-tokens", type=int, default=128)
    adaptation.add_argument("--cpu-share", type=float, default=1.0, metavar="SHARE", help="of the trainer")
    adaptation.add_argument("--only", choices=["on", "off"], help="with or without adaptation alone")
    adaptation.add_argument("--policy", choices=["fixed", "goodput"], default="goodput", help="how K is chosen")
    adaptation.add_argument("--k", type=int, default=5, help="K of the policy fixed, or its upper bound")
    adaptation.add_argument("--no-lookup", action="store_true", help="draft by the model alone")
    adaptation.add_argument("--price", action="store_true", help="what it costs the requests, in place of the curve")
    adaptation.add_argument("--seed", type=int, default=0, help="of the prompts")
    adaptation.add_argument("--out", type=Path, help="write the figures as JSON")
    adaptation.set_defaults(run=_run("adaptation.run", "adaptation"))


def _add_experts(actions: Any) -> None:
    experts = actions.add_parser(
        "experts",
        help="the pace on a mixture of experts beside a dense model of the same active size",
        description="Random models, and a draft that agrees with each at a planted rate, in engines of this process: "
        "tokens per second at every fixed K and under goodput, the K that goodput chooses, and the cost model's error.",
    )
    experts.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    experts.add_argument("--rounds", type=int, default=3, help="turns of each policy; figures are medians")
    experts.add_argument(
        "--scale", type=float, default=0.05, help="factor of the target's upper layers; lower means more acceptance"
    )
    experts.add_argument("--dry-run", action="store_true", help="the same code with tiny shapes")
    experts.add_argument("--out", type=Path, help="write the figures as JSON")
    experts.set_defaults(run=_run("gpu.experts", "experts"))


def _add_proposers(actions: Any) -> None:
    proposers = actions.add_parser(
        "proposers",
        help="every proposer of draft tokens, alone and merged, without Ray and HTTP",
        description="Tokens per verification, share of drafting and tokens per second over the first variant, by kind "
        "of work. A variant is PART+PART@KxWIDTH:POLICY. Parts: off, ngram, shared, the name of a draft, tree. "
        "Without a policy K is fixed.",
    )
    proposers.add_argument("--prompts", type=Path, required=True, help="prompt file (JSON lines) with categories")
    proposers.add_argument(
        "--kinds",
        nargs="+",
        default=["translation", "summarization", "qa", "math_reasoning", "rag", "mt_bench"],
        metavar="NAME",
        help="categories of the prompt file",
    )
    proposers.add_argument("--variants", nargs="+", metavar="NAME", default=list(PROPOSERS))
    proposers.add_argument(
        "--drafts",
        nargs="*",
        default=["eagle=smollm2-eagle"],
        metavar="NAME=DRAFT",
        help="drafts by the name that variants use: a draft that ships, a folder or a Hugging Face id",
    )
    proposers.add_argument("--model", default="smollm2", help="target")
    proposers.add_argument("--streams", type=int, nargs="+", default=[1], metavar="N")
    proposers.add_argument("--per-kind", type=int, default=3, metavar="N", help="prompts per kind of work")
    proposers.add_argument("--max-tokens", type=int, default=64)
    proposers.add_argument("--temperature", type=float, default=0.0)
    proposers.add_argument("--rounds", type=int, default=2, help="rounds, which alternate in order")
    proposers.add_argument("--warm-up", type=int, default=1, help="rounds before those, which are not counted")
    proposers.add_argument("--kv-cache-tokens", type=int, default=65536, metavar="N")
    proposers.add_argument("--out", type=Path, help="write the figures as JSON")
    proposers.set_defaults(run=_run("proposers.run", "proposers"))


def _add_proxy(actions: Any) -> None:
    proxy = actions.add_parser(
        "proxy",
        help="CPU time per token behind Serve's proxy and on the direct port",
        description="One replica with both entries; the entries take turns under a continuous load. CPU time of every "
        "process, over the tokens that were emitted.",
    )
    proxy.add_argument("--streams", type=int, nargs="+", default=[32], metavar="N")
    proxy.add_argument("--rounds", type=int, default=4, help="turns of each entry; figures are medians")
    proxy.add_argument("--seconds", type=float, default=6.0, metavar="S", help="seconds of a turn")
    proxy.add_argument("--max-tokens", type=int, default=128)
    proxy.add_argument("--haproxy", action="store_true", help="HAProxy in place of Serve's own proxy")
    proxy.add_argument("--out", type=Path, help="write the figures as JSON lines")
    proxy.set_defaults(run=_run("proxy.run", "proxy"))


def _add_gpu(actions: Any) -> None:
    gpu = actions.add_parser(
        "gpu",
        help="check and measure the GPU path on one device",
        description="Check drafts over CUDA IPC, kernels and recorded forwards against their twins, then measure the "
        "forward of an 8B shape and whole engines with a planted acceptance rate, at 1 to 256 streams under each "
        "policy. Writes one JSON file and one plot. Status 1 if a check fails.",
    )
    gpu.add_argument("--dry-run", action="store_true", help="the same code on the CPU with tiny shapes")
    gpu.add_argument("--minutes", type=float, default=7.0, metavar="M", help="no measurement begins after this time")
    gpu.add_argument("--out", type=Path, default=Path("gpu.json"), help="the report")
    gpu.add_argument("--plot", type=Path, default=Path("gpu.png"), metavar="PNG")
    gpu.set_defaults(run=_run("gpu.run", "gpu"))


def _add_soak(actions: Any) -> None:
    soak = actions.add_parser(
        "soak",
        help="mixed load while processes are killed and stopped",
        description="Start a server, load it with a mix of requests, inject random faults, and check that every "
        "request ends exactly once and that memory, files and shared memory do not grow. Status 1 on any violation.",
    )
    soak.add_argument("--minutes", type=float, default=30.0, metavar="M")
    soak.add_argument("--streams", type=int, default=8, metavar="N", help="requests in flight")
    soak.add_argument("--draft", help="see `serve` (default: that of the deployment file)")
    soak.add_argument("--tp", type=int, default=1, metavar="N", help="target shards")
    soak.add_argument(
        "--faults",
        nargs="*",
        default=["kill-draft", "stop-draft", "kill-target", "kill-controller"],
        metavar="NAME",
        help="kill-ROLE or stop-ROLE; ROLE is draft, target, controller (kill only) or replica",
    )
    soak.add_argument(
        "--pause", type=float, default=20.0, metavar="S", help="mean seconds between a recovery and the next fault"
    )
    soak.add_argument("--seed", type=int, default=0)
    soak.add_argument("--out", type=Path, help="write every outcome, fault and sample as JSON")
    soak.set_defaults(run=_run("soak.run", "soak"))


def _add_pace(actions: Any) -> None:
    pace = actions.add_parser(
        "pace",
        help="compare policies on one server",
        description="Policies take turns on one server under a continuous load: tokens per second for every number of "
        "streams and workload. Or one of --tax, --ramp, --resume. The workload `adversarial` is chat with a draft that "
        "is always rejected.",
        parents=[_common()],
    )
    pace.add_argument("--draft", help="ngram, or folder, name or id of a draft (default: that of the deployment file)")
    pace.add_argument(
        "--policies",
        nargs="+",
        default=["off", "fixed-2", "fixed-4", "fixed-8", "threshold", "goodput"],
        metavar="NAME",
        help="off, fixed-K, threshold or goodput",
    )
    pace.add_argument("--seconds", type=float, default=4.0, metavar="S", help="seconds per policy, round and cell")
    pace.add_argument("--plot", type=Path, metavar="PNG", help="draw the grid (needs matplotlib)")
    other = pace.add_mutually_exclusive_group()
    other.add_argument(
        "--tax", action="store_true", help="cost of an unused draft: no draft, policy off, and policy goodput at K = 0"
    )
    other.add_argument("--ramp", action="store_true", help="raise and lower the number of streams under each policy")
    other.add_argument(
        "--resume",
        type=float,
        metavar="S",
        help="acceptance before and after S seconds of K = 0, at the largest number of streams",
    )
    pace.set_defaults(run=_run("pace.run", "pace"))


def _add_peers(actions: Any) -> None:
    peers = actions.add_parser(
        "peers",
        help="compare Paceline with other installed servers",
        description="Measure every server in turn, alone on the machine, on the same prompts. Rounds alternate in "
        "order; figures are medians. For a peer that is not installed, the command that installs it is printed.",
        parents=[_common(streams=PEER_STREAMS)],
    )
    peers.add_argument("--draft", help="draft of Paceline (default: that of the deployment file)")
    peers.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(os.environ.get("PACELINE_VLLM_PYTHON", "vllm/bin/python")),
        metavar="PATH",
        help="interpreter of vLLM's environment (or $PACELINE_VLLM_PYTHON)",
    )
    peers.add_argument(
        "--llama-server",
        type=Path,
        default=Path(os.environ.get("PACELINE_LLAMA_SERVER", "llama-server")),
        metavar="PATH",
        help="llama.cpp's server, with llama-quantize in the same folder (or $PACELINE_LLAMA_SERVER)",
    )
    peers.add_argument("--only", nargs="+", metavar="NAME", help="contenders to measure, such as 'paceline plain' vllm")
    peers.add_argument("--quick", action="store_true", help="two rounds, one request per stream; about 15 minutes")
    peers.add_argument("--plot", type=Path, metavar="PNG", help="draw the figures (needs matplotlib)")
    peers.set_defaults(run=_run("peers.run", "peers"))


def _add_engine(actions: Any) -> None:
    engine = actions.add_parser(
        "engine",
        help="the engine without Serve and HTTP, and the handoff to a draft",
        parents=[_common(streams=PEER_STREAMS)],
    )
    engine.add_argument("--draft", default="none", choices=["none", "ngram"])
    engine.add_argument(
        "--packed", nargs="+", default=["auto"], choices=["auto", "off"], help="settings to compare, side by side"
    )
    engine.set_defaults(run=_run("engine_only.run", "engine"))


def _common(streams: Sequence[int] = STREAMS) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--streams", type=int, nargs="+", default=list(streams), metavar="N")
    common.add_argument("--rounds", type=int, default=3, help="rounds, which alternate in order; figures are medians")
    common.add_argument("--per-stream", type=int, default=3, metavar="N", help="requests per stream and round")
    common.add_argument("--at-least", type=int, default=6, metavar="N", help="smallest number of requests in a round")
    common.add_argument("--max-tokens", type=int, default=128)
    common.add_argument(
        "--workload",
        "--workloads",
        nargs="+",
        default=["chat"],
        help="chat, chat-0.7, chat-1.0, code, schema, schema-0.7, schema-1.0; for pace also adversarial, "
        "and with --prompts a category of that file, or all",
    )
    common.add_argument("--prompts", type=Path, help="prompt file (JSON lines) instead of a built-in workload")
    common.add_argument(
        "--categories", nargs="*", metavar="NAME", help="categories of the prompt file, measured separately"
    )
    common.add_argument("--out", type=Path, help="write the figures as JSON lines")
    return common


def _run(module: str, name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        action = getattr(
            importlib.import_module(f"bench.{module}"), name
        )  # imported here, because its dependencies take seconds
        signal.signal(signal.SIGTERM, _leave)
        status: int = action(options)
        return status

    return run


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit through the context managers, which stop the servers that were started."""
    del frame
    sys.exit(128 + number)
