"""What an engine will need and give on described hardware: memory, context, time per token, and where drafting stops.

Owns the joining of the memory plan that a shard makes at start, the cost model and the allocation of the policy
`goodput`, for hardware that need not exist. Costs of GPUs come from data sheets; those of a CPU from a measured table.
Loads no weights. No Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from autoscale.policy.allocation import allocate
from autoscale.policy.cost_model import CostModel, CostTable
from autoscale.policy.goodput import DEFAULT_SWITCH
from autoscale.simulation.gpus import Cluster
from autoscale.simulation.hardware import roofline_table
from autoscale.simulation.shapes import draft_forward, target_forward
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.config import DRAFT_METHODS, EngineConfig
from engine.errors import ConfigError
from engine.model.device import pick_kv_dtype
from engine.model.runner import kv_bytes_per_token
from engine.workers.memory_plan import LEAST_CONTEXT, MemoryPlan, Part, plan_memory, weight_bytes

BANDWIDTH_SHARE, FLOPS_SHARE = 0.7, 0.5
"""Shares of the data sheet's rates that a forward reaches. Assumptions."""
LAUNCHES_PER_LAYER, LAUNCH_S = 17, 5e-6
"""Kernel launches of a Llama layer (docs/gpu.md), and seconds of the host for each. There are no CUDA graphs."""
FORWARD_S = 3e-4
"""Seconds of a GPU forward that do not depend on its size: copies of its inputs and waits. An assumption."""
EXCHANGE_S = 1.5e-5
"""Seconds of one all-reduce of a few rows between GPUs with NVLink; a layer has two. An assumption."""
CPU_OVERHEAD_S, CPU_SAMPLE_ROW_S, CPU_SERVING_S = 5e-4, 4e-5, 1.6e-4
"""On a CPU: seconds per step besides forward and draft, seconds per sampled row, and CPU seconds of HTTP, Serve and Ray
per token (docs/benchmarks.md). A cost table that is measured at start lacks them. One that was learned from steps holds
them: while HTTP, Serve and Ray have a core, a step takes longer."""
CPU_SERVING_BYTES, CPU_SHARD_BYTES, CPU_DRAFT_BYTES = 1.06e9, 0.3e9, 0.4e9
"""On a CPU: resident bytes of Ray, Serve, the controller and one replica; of the shard's process besides weights and KV
cache; and of the draft's process (docs/benchmarks.md)."""
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The load that a plan is made for."""

    streams: tuple[int, ...]
    """Numbers of concurrent requests per replica."""
    context_len: int
    """Mean tokens in the KV cache of a request while it decodes."""
    acceptance: float
    """Acceptance rate of a drafted token at every position. An assumption until it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one replica gives at one number of streams."""

    streams: int
    """Concurrent requests."""
    fits: bool
    """Whether the KV cache holds all of them; the others wait."""
    plain_tpot_s: float
    """Seconds per output token of a request without drafting."""
    tpot_s: float
    """The same with the drafts that `goodput` would choose."""
    mean_k: float
    """Mean draft tokens per request and step; 0 where drafting does not pay."""

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens per second of all streams without drafting."""
        return self.streams / self.plain_tpot_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all streams with drafting."""
        return self.streams / self.tpot_s

    @property
    def gain(self) -> float:
        """Tokens per second with drafting over those without."""
        return self.plain_tpot_s / self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The expected behaviour of one deployment."""

    hardware: str
    """The hardware in words."""
    tensor_parallel_size: int
    """Shards of one replica."""
    num_replicas: int
    """Replicas that the hardware holds."""
    memory: tuple[MemoryPlan, ...]
    """Of shard 0 and, if there are several, of the last shard."""
    kv_tokens: int
    """Tokens that the KV cache of a replica holds."""
    longest_context: int
    """Longest prompt and output together, in tokens."""
    prompt_tokens_per_s: float
    """Prompt tokens per second while nothing decodes."""
    points: tuple[Point, ...]
    """One per number of streams."""
    most_streams: int
    """Largest number of streams that are computed at once: the KV cache and the rows of a step bound it."""
    pays_up_to: int | None
    """Largest number of streams, up to `most_streams`, at which drafting pays; None without a draft."""

    def cost_per_million(self, point: Point, price_per_hour: float) -> float:
        """Price of a million output tokens at a point, for an hourly price of all the hardware."""
        return price_per_hour / (3600 * self.num_replicas * point.tokens_per_s) * 1e6


def plan_gpus(
    engine: EngineConfig, target: ModelConfig, draft: ModelConfig | None, cluster: Cluster, traffic: Traffic
) -> Plan:
    """The plan for GPUs of one node.

    Args:
        engine: the settings. `tensor_parallel_size` is the smallest that is tried.
        target, draft: shapes.
        cluster: the GPUs.
        traffic: the load.

    Raises:
        ConfigError: the model does not fit these GPUs.
    """
    gpu = cluster.gpu
    engine, memory = _smallest_that_fits(engine, target, cluster)
    size = engine.tensor_parallel_size
    if draft is not None:
        _check_draft(engine, draft, gpu.memory_bytes)
    forward = target_forward(target, ShardSpec(0, size))
    of_draft = draft_forward(draft) if draft is not None else None
    table = roofline_table(
        target_bytes=forward.read_bytes,
        target_flops_per_token=forward.flops_per_row,
        draft_bytes=of_draft.read_bytes if of_draft is not None else 0.0,
        draft_flops_per_token=of_draft.flops_per_row if of_draft is not None else 0.0,
        bytes_per_s=gpu.bytes_per_s * BANDWIDTH_SHARE,
        flops_per_s=gpu.flops_per_s * FLOPS_SHARE,
        kv_bytes_per_token=memory[0].kv_bytes_per_token,
        launch_s=FORWARD_S,
        target_least_s=target.num_layers * LAUNCHES_PER_LAYER * LAUNCH_S,
        draft_least_s=draft.num_layers * LAUNCHES_PER_LAYER * LAUNCH_S if draft is not None else 0.0,
        exchange_s=2 * target.num_layers * EXCHANGE_S if size > 1 else 0.0,
    )
    return _plan(str(cluster), engine, target, table, memory, traffic, num_replicas=cluster.count // size)


def plan_cpu(
    engine: EngineConfig,
    target: ModelConfig,
    table: CostTable,
    traffic: Traffic,
    *,
    weights: int,
    kv_budget: int,
    num_cores: int,
) -> Plan:
    """The plan for this machine's CPU, from costs that it measured.

    Args:
        engine: the settings.
        target: shape.
        table: measured when the model was served here, with its draft if it has one.
        traffic: the load.
        weights: bytes of the target's weights in memory.
        kv_budget: bytes that the KV cache may take.
        num_cores: cores that the engine shares with HTTP, Serve and Ray.
    """
    per_token = kv_bytes_per_token(target, dtype=pick_kv_dtype(engine, _DTYPE))
    parts = [
        Part("weights", weights),
        Part("Ray, Serve, controller, replica", int(CPU_SERVING_BYTES)),
        Part("process of the shard", int(CPU_SHARD_BYTES)),
    ]
    if engine.speculative.method in DRAFT_METHODS:
        parts.append(Part("process of the draft", int(CPU_DRAFT_BYTES)))
    memory = MemoryPlan(sum(part.num_bytes for part in parts) + kv_budget, tuple(parts), per_token)
    filled = replace(
        table,
        overhead_s=table.overhead_s or CPU_OVERHEAD_S,
        sample_row_s=table.sample_row_s or CPU_SAMPLE_ROW_S,
    )
    is_learned = table.overhead_s > 0
    serving_s = 0.0 if is_learned else CPU_SERVING_S / num_cores
    return _plan("this CPU", engine, target, filled, (memory,), traffic, num_replicas=1, serving_s=serving_s)


def _smallest_that_fits(
    engine: EngineConfig, target: ModelConfig, cluster: Cluster
) -> tuple[EngineConfig, tuple[MemoryPlan, ...]]:
    """The settings with the smallest number of shards that divides the GPUs and fits, and the plans of its shards."""
    refusal = ConfigError(f"--tp: {engine.tensor_parallel_size} given; {cluster} has {cluster.count} GPUs")
    for size in range(engine.tensor_parallel_size, cluster.count + 1):
        if cluster.count % size or size > target.num_kv_heads:
            continue
        sized = engine.model_copy(update={"tensor_parallel_size": size})
        memory = tuple(
            plan_memory(sized, target, rank=rank, device_bytes=cluster.gpu.memory_bytes)
            for rank in sorted({0, size - 1})
        )
        try:
            for each in memory:
                each.check(min(engine.max_model_len or target.max_model_len, LEAST_CONTEXT))
        except ConfigError as error:
            refusal = error
            continue
        return sized, memory
    raise refusal


def _check_draft(engine: EngineConfig, draft: ModelConfig, device_bytes: int) -> None:
    """Whether the draft's weights fit its share of the device.

    Raises:
        ConfigError: they do not.
    """
    share = engine.speculative.memory_fraction
    needed = weight_bytes(draft, WHOLE, _DTYPE) if draft.medusa is None else draft_forward(draft, _DTYPE).read_bytes
    if needed > share * device_bytes:
        raise ConfigError(
            f"draft: its weights take {needed / 1e9:.1f} GB, and speculative.memory_fraction leaves "
            f"{share * device_bytes / 1e9:.1f} GB ({share:.0%}); take a smaller draft"
        )


def _plan(
    hardware: str,
    engine: EngineConfig,
    target: ModelConfig,
    table: CostTable,
    memory: tuple[MemoryPlan, ...],
    traffic: Traffic,
    *,
    num_replicas: int,
    serving_s: float = 0.0,
) -> Plan:
    cost, kv_tokens = CostModel(table), min(each.kv_tokens for each in memory)
    longest = min(engine.max_model_len or target.max_model_len, target.max_model_len, kv_tokens)
    estimate = _Estimate(cost, engine, traffic, kv_tokens, serving_s)
    rows = engine.max_step_tokens
    most = min(rows, kv_tokens // traffic.context_len)
    has_draft = engine.speculative.method != "none"
    return Plan(
        hardware=hardware,
        tensor_parallel_size=engine.tensor_parallel_size,
        num_replicas=num_replicas,
        memory=memory,
        kv_tokens=kv_tokens,
        longest_context=longest,
        prompt_tokens_per_s=rows / cost.step_s(rows, 0, num_prompt_rows=rows),
        points=tuple(estimate.at(streams) for streams in traffic.streams),
        most_streams=most,
        pays_up_to=estimate.pays_up_to(most) if has_draft else None,
    )


class _Estimate:
    """Time per token of a replica at any number of streams."""

    def __init__(
        self, cost: CostModel, engine: EngineConfig, traffic: Traffic, kv_tokens: int, serving_s: float
    ) -> None:
        self._cost = cost
        self._engine = engine
        self._traffic = traffic
        self._kv_tokens = kv_tokens
        self._serving_s = serving_s

    def at(self, streams: int) -> Point:
        """One number of streams."""
        cost, context = self._cost, self._traffic.context_len
        plain_s = cost.step_s(streams, streams * context)
        tokens, seconds, mean_k = float(streams), plain_s, 0.0
        # Decodes take at most one row each, and drafts at most the rows that a step has left.
        width = min(self._engine.speculative.k, self._engine.max_step_tokens // streams - 1)
        if self._engine.speculative.method != "none" and width > 0:
            rate = self._traffic.acceptance
            best = allocate(
                np.tile(rate ** np.arange(1.0, width + 1), (streams, 1)),
                base_s=plain_s,
                # The draft reads what a step emits: one token, and the accepted ones before it.
                fixed_s=cost.ask_s + cost.catch_up_s * streams * (1 + rate),
                pass_s=cost.pass_s(streams),
                added_s=cost.added_rows_s(streams, streams * width),
                depths=range(1, width + 1),
                positions_per_pass=cost.positions_per_pass,
            )
            tokens, seconds, mean_k = best.tokens, best.seconds, float(best.ks.mean())
        return Point(
            streams=streams,
            fits=streams * context <= self._kv_tokens,
            plain_tpot_s=plain_s + streams * self._serving_s,
            tpot_s=(seconds + tokens * self._serving_s) * streams / tokens,
            mean_k=mean_k,
        )

    def pays_up_to(self, most: int) -> int:
        """Largest number of streams, up to `most`, at which drafting gains what switches it on; 0 if there is none."""
        low, high = 0, most
        while low < high:  # The gain falls with the number of streams.
            middle = (low + high + 1) // 2
            if self.at(middle).gain >= DEFAULT_SWITCH.on_gain:
                low = middle
            else:
                high = middle - 1
        return low
