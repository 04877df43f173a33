"""What a shard leaves of its GPU for the KV cache: by the shapes once the weights are loaded, then by measurement.

Owns the questions to the device and the lines that are logged. The arithmetic is in `engine.workers.memory_plan`.

    device    | others | context, NCCL | weights | activations of the largest step | draft, graphs, reserve | KV cache |
    measured            not free ........ held .. peak while it runs ..............  estimated             what is left
"""

from __future__ import annotations

import gc
import logging
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.device import pick_kv_dtype
from engine.model.load import Model
from engine.model.runner import ModelRunner, num_kv_blocks
from engine.sampling.readback import StepClock
from engine.workers.largest_step import NUM_BLOCKS, LargestStep
from engine.workers.memory_plan import (
    ACTIVATIONS,
    CONTEXT_BYTES,
    GIB,
    LEAST_CONTEXT,
    MemoryPlan,
    draft_process_bytes,
    plan_memory,
)

_log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one device. All values are bytes."""

    def total(self) -> int:
        """All of the device."""
        ...

    def free(self) -> int:
        """What no process has taken."""
        ...

    def reserved(self) -> int:
        """What PyTorch has taken from the device in this process."""
        ...

    def allocated(self) -> int:
        """What the tensors of this process hold."""
        ...

    def peak(self) -> int:
        """The most that they have held since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        ...

    def give_back(self) -> None:
        """Give the device what PyTorch has reserved and no tensor holds."""
        ...


class CudaMemory:
    """`DeviceMemory` of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def estimated_plan(engine: EngineConfig, model: Model, memory: DeviceMemory) -> MemoryPlan:
    """The plan of a shard by its shapes, once the weights are loaded. Logged.

    Raises:
        ConfigError: there is no room for the cache, with the plan.
    """
    plan = _plan(engine, model, memory)
    _log.info("memory of shard %d, estimated:\n%s", model.shard.rank, plan.table())
    _check(engine, model, plan)
    return plan


def measured_blocks(engine: EngineConfig, model: Model, memory: DeviceMemory, clock: StepClock) -> int:
    """`fitting_blocks` by what the process holds and the largest step needs. On all shards at once. Logs the plan.

    Args:
        engine: the settings.
        model: loaded; nothing but its weights is held yet.
        memory: of its device.
        clock: of the shard's steps.

    Raises:
        ConfigError: there is no room for the step or for the cache, with the numbers.
        ShardDown: another shard does not take part.
    """
    peak, rank = _peak(engine, model, memory, clock), model.shard.rank
    memory.give_back()
    estimate = _plan(engine, model, memory)
    plan = estimate.measured(weights=memory.reserved(), activations=peak)
    bound = estimate.part(ACTIVATIONS)
    if peak > bound:
        _log.warning(
            "memory of shard %d: the largest step takes %.3f GiB, more than the %.3f GiB of the estimate that "
            "`paceline plan` and `paceline check` use",
            *(rank, peak / GIB, bound / GIB),
        )
    _log.info("memory of shard %d, measured (activations: estimate %.3f GiB):\n%s", rank, bound / GIB, plan.table())
    _check(engine, model, plan)
    return fitting_blocks(engine, model, plan)


def _peak(engine: EngineConfig, model: Model, memory: DeviceMemory, clock: StepClock) -> int:
    """Bytes that the largest step holds at most, besides weights, KV cache and the draft's distributions."""
    step = LargestStep(engine, model.config, model.device, rank=model.shard.rank)
    runner = ModelRunner(
        model, num_blocks=NUM_BLOCKS, block_size=engine.kv_block_size, kv_dtype=pick_kv_dtype(engine, model.dtype)
    )
    before = memory.allocated()
    memory.reset_peak()
    try:
        step.run(runner.forward, clock)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"memory: the largest step does not fit beside the weights: {error}\n"
            "Lower max_step_tokens or max_num_requests, raise tensor_parallel_size, or take a smaller model."
        ) from None
    return memory.peak() - before


def fitting_blocks(engine: EngineConfig, model: Model, plan: MemoryPlan | None) -> int:
    """Blocks of the KV cache that fit, the scratch block included.

    Args:
        engine: the settings.
        model: loaded.
        plan: of the shard's GPU; None on a CPU, where a share of the free memory is taken.

    Raises:
        ConfigError: no block fits.
    """
    return 1 + num_kv_blocks(
        model.config,
        block_size=engine.kv_block_size,
        dtype=pick_kv_dtype(engine, model.dtype),
        device=model.device,
        shard=model.shard,
        kv_cache_tokens=engine.kv_cache_tokens,
        memory_bytes=None if plan is None else plan.kv_bytes,
    )


def _plan(engine: EngineConfig, model: Model, memory: DeviceMemory) -> MemoryPlan:
    """The estimate for what this shard and its draft can use.

    The draft loads at the same time. What others hold counts as the draft's, as far as the draft may hold that much;
    the plan has parts for it, which would be taken off twice otherwise.
    """
    config, rank = model.config, model.shard.rank
    available = memory.free() + memory.reserved() + CONTEXT_BYTES  # This process has its context already.
    of_draft = draft_process_bytes(engine, config, rank=rank, device_bytes=memory.total())
    available += max(0, min(memory.total() - available, of_draft))
    return plan_memory(engine, config, rank=rank, device_bytes=available, dtype=model.dtype)


def _check(engine: EngineConfig, model: Model, plan: MemoryPlan) -> None:
    longest = engine.max_model_len or model.config.max_model_len
    plan.check(engine.kv_cache_tokens or min(longest, LEAST_CONTEXT))
