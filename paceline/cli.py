"""The `paceline` command.

Owns options and their translation into settings; the work is done elsewhere. Errors on purpose end with one line on
stderr and status 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoscale.simulation.compare import FIXED_COLUMNS, compare
from autoscale.simulation.hardware import HARDWARE
from autoscale.simulation.simulator import WORKLOADS
from bench.options import add_bench_parser
from dashboards.metrics_page import metrics_lines, metrics_markdown
from dashboards.options import add_dashboards_parser
from deployments.http.keys import add_key
from deployments.local import yaml_config
from distill.options import add_distill_parser
from engine.errors import PacelineError

NGRAM, NO_DRAFT = "ngram", "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    return status


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="paceline",
        description="LLM serving on Ray Serve with speculative decoding that never costs more than it gives.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    _add_key(commands)
    _add_simulate(commands)
    _add_metrics(commands)
    add_bench_parser(commands)
    add_distill_parser(commands)
    add_dashboards_parser(commands)
    return top


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model on this machine until Ctrl-C",
        description="Start a local Ray head on loopback, deploy, wait until healthy, serve until Ctrl-C. "
        "Without options it serves deployments/smollm2.yaml.",
    )
    serve.add_argument("--config", type=Path, help="deployment file to start from (default: deployments/smollm2.yaml)")
    serve.add_argument("--model", help="folder or Hugging Face id of the target, or smollm2")
    serve.add_argument("--draft", help="none, ngram, or folder or id of a draft (default: the file's)")
    serve.add_argument("--k", type=int, help="draft tokens per request and step")
    serve.add_argument("--policy", help="who chooses K: off, fixed, threshold or goodput")
    serve.add_argument("--tp", type=int, metavar="N", help="tensor-parallel target shards")
    serve.add_argument("--dtype", help="auto, bfloat16 or float32")
    serve.add_argument("--device", help="auto, cpu or cuda")
    serve.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt + output")
    serve.add_argument("--model-name", help="name that clients send (default: from --model)")
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1); others need API keys")
    serve.add_argument("--port", type=int, help="port (default: 8000)")
    serve.add_argument("--api-keys", type=Path, metavar="FILE", help="key file; see `paceline key`")
    serve.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="seconds until healthy")
    serve.set_defaults(run=_serve)


def _add_check(commands: Any) -> None:
    check = commands.add_parser("check", help="check deployment files without a cluster")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")
    check.set_defaults(run=_check)


def _add_key(commands: Any) -> None:
    key = commands.add_parser(
        "key",
        help="make an API key",
        description="Make an API key, print it once, and append its hash to a key file; limits may be added there.",
    )
    key.add_argument("name", help="whose key this is, for limits and logs")
    key.add_argument("--file", type=Path, default=Path("keys.yaml"), help="key file (default: keys.yaml)")
    key.set_defaults(run=_key)


def _key(options: argparse.Namespace) -> int:
    print(add_key(options.file, options.name))
    return 0


def _add_metrics(commands: Any) -> None:
    metrics = commands.add_parser("metrics", help="list every metric: name, kind, labels, what it counts")
    metrics.add_argument("--markdown", action="store_true", help="as the page in docs, with a query for each")
    metrics.set_defaults(run=_metrics)


def _metrics(options: argparse.Namespace) -> int:
    print(metrics_markdown() if options.markdown else "\n".join(metrics_lines()), end="" if options.markdown else "\n")
    return 0


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="compare policies on hardware and loads that need not exist",
        description="Replay a closed-loop load through every policy and print goodput, its share of the oracle's, and "
        "how often drafting went on or off.",
    )
    simulate.add_argument("--hardware", choices=sorted(HARDWARE), default="cpu-smollm2")
    simulate.add_argument("--workload", choices=sorted(WORKLOADS), default="chat")
    simulate.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32, 64], metavar="N")
    simulate.add_argument("--max-k", type=int, default=8, metavar="K")
    simulate.add_argument("--seconds", type=float, default=20.0, metavar="S", help="simulated time per cell")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{options.workload} on {options.hardware}: tokens/s (share of the oracle, switches)")
    columns = [*FIXED_COLUMNS, "threshold", "goodput"]
    for name in ["streams", "oracle", *columns]:
        table.add_column(name, justify="right")
    for streams in options.streams:
        outcomes = compare(
            HARDWARE[options.hardware](),
            WORKLOADS[options.workload],
            streams=streams,
            max_k=options.max_k,
            duration_s=options.seconds,
            seed=options.seed,
        )
        best = outcomes["oracle"].goodput
        cells = [f"{o.goodput:.0f} ({o.goodput / best:.2f}, {o.switches})" for o in (outcomes[c] for c in columns)]
        table.add_row(str(streams), f"{best:.0f}", *cells)
    Console().print(table)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from deployments.local.server import serve  # imports ray: seconds that `--help` should not cost

    values = yaml_config.load(options.config or yaml_config.DEFAULT_FILE)
    args = overridden(values["applications"][0].get("args") or {}, options)
    return serve(
        yaml_config.with_overrides(values, args=args, host=options.host, port=options.port),
        start_timeout_s=options.start_timeout,
    )


def overridden(args: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The file's arguments with the command line's on top."""
    engine = dict(args.get("engine") or {})
    speculative = dict(engine.get("speculative") or {})
    draft = options.draft
    if draft is None and options.model not in (None, engine.get("model")) and speculative.get("draft"):
        draft = NGRAM  # the file's draft imitates the file's model
    if draft is not None:
        speculative.pop("method", None)
        speculative |= {"method": draft, "draft": None} if draft in (NGRAM, NO_DRAFT) else {"draft": draft}
    speculative |= _given(k=options.k, policy=options.policy)
    engine |= _given(
        model=options.model,
        tensor_parallel_size=options.tp,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
    )
    changed = args | {"engine": engine | {"speculative": speculative}}
    if options.model is not None:
        changed["model_name"] = None
    keys = str(options.api_keys.resolve()) if options.api_keys is not None else None
    return changed | _given(model_name=options.model_name, api_keys_file=keys)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check(options: argparse.Namespace) -> int:
    for file in options.files:
        values = yaml_config.load(file)
        print(f"{file}: ok")
        for settings in yaml_config.check(values):
            print(f"  {settings.served_name}: {yaml_config.describe_upgrade(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
