"""`paceline plan`: what a model will need and give on hardware that need not exist yet.

Knows the options and how a plan is printed; `autoscale.simulation.planning` makes it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoscale.policy.cost_model import CostTable
    from autoscale.simulation.planning import Plan, Traffic
    from engine.checkpoint.model_config import ModelConfig
    from engine.config import EngineConfig

NO_DRAFT = "none"


def add_plan_parser(commands: Any) -> None:
    """Add `plan` to the command's subparsers."""
    plan = commands.add_parser(
        "plan",
        help="memory, context, speed and price of a model on given GPUs, or on this CPU once it has been served here",
        description="Estimate from a model's shape alone: memory by part, shards, longest context, time per output "
        "token and tokens per second with and without drafting, and the price of a million tokens. GPUs are described "
        "by their data sheets; a CPU by the costs that the server measured here.",
    )
    plan.add_argument("model", metavar="MODEL", help="folder with a config.json, or a name such as llama-3.1-8b")
    plan.add_argument("--gpus", metavar="NxNAME", help="GPUs of one node, such as 4xH100 (default: this CPU)")
    plan.add_argument("--draft", default=NO_DRAFT, help="none, eagle, or folder or name of a draft (default: none)")
    plan.add_argument("--k", type=int, default=5, help="upper bound of draft tokens per request and step (default: 5)")
    plan.add_argument(
        "--acceptance",
        type=float,
        default=0.6,
        metavar="RATE",
        help="assumed acceptance rate of a drafted token (default: 0.6, the simulator's chat)",
    )
    plan.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel shards, at least (default: 1)")
    plan.add_argument(
        "--streams", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="requests per replica"
    )
    plan.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="mean tokens in a request's cache")
    plan.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt + output")
    plan.add_argument("--max-step-tokens", type=int, default=512, metavar="ROWS", help="rows of one forward")
    plan.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "int8", "fp8"),
        default="auto",
        help="type of the KV cache: auto, int8 on a CPU, fp8 on GPUs; the last two are lossy (default: auto)",
    )
    plan.add_argument("--max-loras", type=int, default=0, metavar="N", help="LoRA adapters held at once (default: 0)")
    plan.add_argument("--max-lora-rank", type=int, default=64, metavar="RANK", help="their largest rank (default: 64)")
    plan.add_argument("--price", type=float, metavar="PER_HOUR", help="price of one GPU, or of this machine, per hour")
    plan.add_argument("--json", action="store_true", help="as one JSON object")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from autoscale.simulation import planning
    from autoscale.simulation.gpus import parse_gpus

    _check(options)
    traffic = planning.Traffic(
        streams=tuple(options.streams), context_len=options.context, acceptance=options.acceptance
    )
    if options.gpus is None:
        made, price = _of_this_cpu(options, traffic), options.price
    else:
        cluster = parse_gpus(options.gpus)
        target, draft = _shapes(options)
        made = planning.plan_gpus(_settings(options, draft), target, draft, cluster, traffic)
        price = options.price * cluster.count if options.price is not None else None
    if options.json:
        print(json.dumps(_as_json(made, traffic, price)))
    else:
        _show(made, options, price)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError where a number is out of its bounds; the settings check the others."""
    from engine.errors import ConfigError

    if not 0 <= options.acceptance < 1:
        raise ConfigError(f"--acceptance: {options.acceptance} given; allowed are 0 to below 1")
    if options.max_loras and options.gpus is None:
        raise ConfigError(f"--max-loras: {options.max_loras} given; a plan of this CPU has no adapters")
    if options.price is not None and not options.price > 0:
        raise ConfigError(f"--price: {options.price} given; allowed are prices above 0")
    if options.context < 1:
        raise ConfigError(f"--context: {options.context} given; allowed are whole numbers above 0")
    if any(not 1 <= streams <= options.max_step_tokens for streams in options.streams):
        raise ConfigError(f"--streams: allowed are 1 to --max-step-tokens, which is {options.max_step_tokens}")


def _settings(options: argparse.Namespace, draft: ModelConfig | None) -> EngineConfig:
    from engine.config import EngineConfig

    speculative = {"method": "none"} if draft is None else {"method": draft.architecture, "draft": options.draft}
    lora = {"max_loras": options.max_loras, "max_lora_rank": options.max_lora_rank}
    return EngineConfig.parse(
        {
            "model": options.model,
            "device": "cpu" if options.gpus is None else "cuda",
            "tensor_parallel_size": options.tp,
            "max_model_len": options.max_model_len,
            "max_num_requests": max(options.streams),
            "max_step_tokens": options.max_step_tokens,
            "kv_cache_dtype": options.kv_cache_dtype,
            "lora": lora if options.max_loras else None,
            "speculative": speculative | {"k": options.k},
        }
    )


def _shapes(options: argparse.Namespace) -> tuple[ModelConfig, ModelConfig | None]:
    from autoscale.simulation.shapes import EAGLE, eagle_of, shape_of
    from engine.checkpoint.draft_check import fit_medusa

    target = shape_of(options.model)
    if options.draft == NO_DRAFT:
        return target, None
    if options.draft == EAGLE:
        return target, eagle_of(target)
    draft = shape_of(options.draft)
    return target, fit_medusa(draft, target) if draft.medusa is not None else draft


def _of_this_cpu(options: argparse.Namespace, traffic: Traffic) -> Plan:
    import psutil

    from autoscale.simulation.planning import plan_cpu
    from deployments.local.weights import model_bytes
    from engine.checkpoint.model_config import ModelConfig
    from engine.checkpoint.store import EMBEDDED, cache_folder, embedded_folder
    from engine.errors import ConfigError
    from engine.model.runner import CPU_MEMORY_FRACTION, CPU_MEMORY_LIMIT

    if options.tp != 1:
        raise ConfigError(f"--tp: {options.tp} given; a plan of this CPU has one shard")
    folder = embedded_folder(cache_folder()) if options.model == EMBEDDED else Path(options.model).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model: {options.model!r} is no folder with a config.json; a plan of this CPU needs a model that was "
            "served here. Give --gpus for other hardware"
        )
    table = _measured(folder.resolve(), None if options.draft == NO_DRAFT else options.draft)
    if table is None:
        with_draft = "" if options.draft == NO_DRAFT else f" --draft {options.draft}"
        raise ConfigError(
            f"model: the costs of `{options.model}{with_draft}` were not measured on this machine; "
            f"start `paceline serve --model {options.model}{with_draft}` once, or give --gpus"
        )
    target = ModelConfig.load(folder)
    budget = min(int(psutil.virtual_memory().available * CPU_MEMORY_FRACTION), CPU_MEMORY_LIMIT)
    draft = target if options.draft != NO_DRAFT else None  # The table has the draft's costs; its shape is not needed.
    settings = _settings(options, draft)
    weights, _ = model_bytes(settings, folder)
    cores = os.cpu_count() or 1
    return plan_cpu(settings, target, table, traffic, weights=weights, kv_budget=budget, num_cores=cores)


def _measured(folder: Path, draft: str | None) -> CostTable | None:
    """The newest cost table of a model on this CPU, with this draft; with any or none where `draft` is None."""
    from autoscale.profiling.table_cache import newest_table
    from engine.checkpoint.store import cache_folder

    def fits(identity: dict[str, str]) -> bool:
        of_draft = draft is None or Path(identity["draft"]).name == Path(draft).name
        return identity["model"] == str(folder) and identity["device"] == "cpu" and of_draft

    return newest_table(cache_folder() / "costs", fits)


def _as_json(plan: Plan, traffic: Traffic, price: float | None) -> dict[str, Any]:
    points = [
        {
            "streams": point.streams,
            "fits": point.fits,
            "plain_tpot_s": point.plain_tpot_s,
            "plain_tokens_per_s": point.plain_tokens_per_s,
            "tpot_s": point.tpot_s,
            "tokens_per_s": point.tokens_per_s,
            "mean_k": point.mean_k,
            "cost_per_million": None if price is None else plan.cost_per_million(point, price),
        }
        for point in plan.points
    ]
    return {
        "hardware": plan.hardware,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "num_replicas": plan.num_replicas,
        "memory": [
            {"device_bytes": shard.device_bytes, "kv_bytes": shard.kv_bytes}
            | {"parts": {part.name: part.num_bytes for part in shard.parts}}
            for shard in plan.memory
        ],
        "kv_tokens": plan.kv_tokens,
        "longest_context": plan.longest_context,
        "prompt_tokens_per_s": plan.prompt_tokens_per_s,
        "most_streams": plan.most_streams,
        "pays_up_to": plan.pays_up_to,
        "acceptance": traffic.acceptance,
        "context_len": traffic.context_len,
        "points": points,
    }


def _show(plan: Plan, options: argparse.Namespace, price: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    replicas = f"{plan.num_replicas} replica{'s' if plan.num_replicas > 1 else ''}"
    console.print(f"{options.model} on {plan.hardware}: {replicas} of tensor_parallel_size {plan.tensor_parallel_size}")
    for number, shard in enumerate(plan.memory):
        which = f", shard {'0' if number == 0 else '1 and later'}" if len(plan.memory) > 1 else ""
        console.print(f"\nMemory{which}\n{shard.table()}", highlight=False)
    console.print(
        f"\nKV cache: {plan.kv_tokens} tokens. Longest context: {plan.longest_context} tokens. "
        f"Prompts: {plan.prompt_tokens_per_s:.0f} tokens/s.\n",
        highlight=False,
    )
    has_draft = plan.pays_up_to is not None
    table = Table(title=f"One replica, {options.context} tokens of context per request")
    names = ["streams", "TPOT ms", "tokens/s"] + ["TPOT ms, drafting", "tokens/s, drafting", "mean K"] * has_draft
    for name in names + ["price of 1M tokens"] * (price is not None):
        table.add_column(name, justify="right")
    for point in plan.points:
        cells = [f"{point.streams}{'' if point.fits else ' (queue)'}"]
        cells += [f"{point.plain_tpot_s * 1e3:.1f}", f"{point.plain_tokens_per_s:.0f}"]
        if has_draft:
            cells += [f"{point.tpot_s * 1e3:.1f}", f"{point.tokens_per_s:.0f}", f"{point.mean_k:.1f}"]
        if price is not None:
            cells.append(f"{plan.cost_per_million(point, price):.2f}")
        table.add_row(*cells)
    console.print(table)
    if has_draft:
        console.print(_where_drafting_pays(plan), highlight=False)
    console.print(_assumptions(options, has_draft=has_draft), highlight=False)


def _where_drafting_pays(plan: Plan) -> str:
    if plan.pays_up_to == plan.most_streams:
        return f"Drafting pays at every number of streams that fits, which is up to {plan.most_streams} per replica."
    return f"Drafting pays up to {plan.pays_up_to} of the {plan.most_streams} streams per replica that fit."


def _assumptions(options: argparse.Namespace, *, has_draft: bool) -> str:
    from autoscale.simulation.planning import BANDWIDTH_SHARE, FLOPS_SHARE

    accepted = f"Assumed: {options.acceptance:g} of drafted tokens are accepted at each position. " if has_draft else ""
    if options.gpus is None:
        return f"{accepted}Costs were measured by the server on this machine."
    return (
        f"{accepted}Assumed: forwards reach {BANDWIDTH_SHARE:.0%} of the data sheet's bandwidth and {FLOPS_SHARE:.0%} "
        "of its bfloat16 rate. No GPU has confirmed these figures yet; measure before you buy."
    )
