"""Two ranks on one GPU: tensor-parallel forwards are those of the whole model, with a draft, over some hundred steps.

NCCL refuses two ranks on one device. So the sums between the shards go through host memory and gloo here; everything
else is the production path: shards that load their slices of a folder, a follower in a process of its own, forward
inputs through shared memory, drafted tokens that rank 0 broadcasts. This checks results and measures no speed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from bench.gpu.lab import HUNG_S, CheckFailed, Lab
from bench.gpu.planted import SHAPE_DRY, SHAPE_SMALL, local_drafter, local_link, planted_pair, save_model
from bench.gpu.sections import BLOCKS_PER_REQUEST, prompt_of, run_engine
from engine.config import EngineConfig
from engine.core.drafter import Drafter, NoDrafter
from engine.core.pacing import SpeculationPlan
from engine.core.packing import SpanRows, pack_spans
from engine.core.step import ForwardInput, ForwardResult
from engine.ipc.forward_broadcast import ForwardHandle
from engine.model.collectives import Collectives, Group, open_store
from engine.model.decoder import Decoder
from engine.workers.bring_up import LocalShard, bring_up, bring_up_locally
from engine.workers.shard_ready import ShardReady
from engine.workers.target_shard import PEER_TIMEOUT_S, TargetShard

NODE = "bench"
K = 4
STREAMS = 8
FP32_BOUND = 1e-4
"""Largest difference of logits in float32: that of the tests of tensor parallelism."""
BF16_BOUND = 0.05
"""The same in bfloat16, as a part of the largest logit: that of the other parts of this bench."""


def ranks(lab: Lab) -> dict[str, Any]:
    """Logits and greedy text of two ranks against those of the whole model, plain and with a draft."""
    shape = lab.pick(SHAPE_SMALL, SHAPE_DRY)
    target, draft = planted_pair(lab, shape=shape)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(target, shape, folder)
        del target
        whole = TargetShard(settings(lab, folder, 1), folder, rank=0, node_id=NODE, device=lab.device)
        bring_up_locally([whole])
        rank0 = StagedShard(settings(lab, folder, 2), folder, rank=0, node_id=NODE, device=lab.device)
        pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, rank0.config, folder, str(lab.device))
        process = multiprocessing.get_context("spawn").Process(target=_follow, args=arguments, daemon=True)
        process.start()
        try:
            asyncio.run(bring_up([LocalShard(rank0), PipeShard(pipe)], block_size=lab.block_size))
            pipe.send(("run", ()))
            return _compare(lab, whole, rank0, draft)
        finally:
            rank0.close()
            process.join(10.0)
            process.kill()


def _compare(lab: Lab, whole: TargetShard, sharded: TargetShard, draft: Decoder) -> dict[str, Any]:
    difference, largest = logit_difference(lab, whole, sharded)
    bound = FP32_BOUND if lab.dry else BF16_BOUND * largest
    if not difference <= bound:
        raise CheckFailed(f"logits of two ranks differ from the whole model's by {difference:g}, allowed are {bound:g}")
    expected, _ = _generate(lab, whole.forward, None)
    report: dict[str, Any] = {"logit_difference": difference, "logit_bound": bound, "gap_bound": 2 * bound}
    for name, model in (("plain", None), ("with_draft", draft)):
        found, cell = _generate(lab, sharded.forward, model)
        report[name] = cell | same_or_near_ties(expected, found, lambda *at: _gap(lab, whole, *at), bound=2 * bound)
    if not report["with_draft"]["acceptance"]:
        raise CheckFailed("two ranks accept no token of a draft that shares the model's lower layers")
    return report


def logit_difference(lab: Lab, whole: TargetShard, sharded: TargetShard) -> tuple[float, float]:
    """Largest difference of the logits of prompts and of verified drafts, and the largest logit."""
    num, prompt = STREAMS, len(prompt_of(lab, 0))
    spans = [[SpanRows(prompt_of(lab, i), 0, [1 + i], prompt) for i in range(num)]]
    spans += [[SpanRows([1 + i] * (K + 1), prompt, [1 + i], K + 1) for i in range(num)]]
    difference = largest = 0.0
    for step in spans:
        plan = pack_spans(step, lab.block_size)
        expected, found = (shard.forward(plan).require_logits() for shard in (whole, sharded))
        difference = max(difference, (found - expected).abs().max().item())
        largest = max(largest, expected.abs().max().item())
    return difference, largest


def same_or_near_ties(
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    gap: Callable[[str, Sequence[int], int, int], float],
    *,
    bound: float,
) -> dict[str, Any]:
    """Compare greedy outputs token by token, up to where the sums in another order flip a near-tie.

    Args:
        expected, found: tokens of each request.
        gap: difference of the logits of two tokens after the prompt of a request and some tokens.
        bound: largest gap of a near-tie.

    Raises:
        CheckFailed: an output differs where there is no near-tie.
    """
    num_same, gaps = 0, [0.0]
    for name, tokens in expected.items():
        pairs = list(zip(tokens, found[name], strict=True))
        parts = [place for place, (one, other) in enumerate(pairs) if one != other]
        num_same += parts[0] if parts else len(pairs)
        if parts:
            gaps.append(gap(name, tokens[: parts[0]], *pairs[parts[0]]))
            if not gaps[-1] <= bound:
                raise CheckFailed(
                    f"request {name} differs at token {parts[0]}, where the logits are {gaps[-1]:g} apart"
                )
    return {"same_tokens": num_same, "near_ties": len(gaps) - 1, "largest_gap": max(gaps)}


def _generate(
    lab: Lab, forward: Callable[[ForwardInput], ForwardResult], draft: Decoder | None
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Greedy tokens of each request, and figures of the run."""
    num_steps = 0

    def counted(forward_input: ForwardInput) -> ForwardResult:
        nonlocal num_steps
        num_steps += 1
        return forward(forward_input)

    num_blocks = 1 + BLOCKS_PER_REQUEST * STREAMS
    drafter: Drafter = NoDrafter()
    if draft is not None:
        link = local_link(lab, draft, num_blocks=num_blocks, max_rows=STREAMS, max_k=K)
        drafter = local_drafter(link, max_rows=STREAMS)
    plan = SpeculationPlan(policy="off" if draft is None else "fixed", max_k=K)
    pacer = PolicyPacer(make_goodput("draft_model", K))
    sizes = {"streams": STREAMS, "num_blocks": num_blocks, "max_tokens": lab.pick(400, 40)}
    cell, tokens = run_engine(lab, counted, drafter, pacer, plan, **sizes)
    return tokens, {"steps": num_steps, "acceptance": cell["acceptance"]}


def _gap(lab: Lab, whole: TargetShard, name: str, tokens: Sequence[int], one: int, other: int) -> float:
    """Difference of the whole model's logits of two tokens."""
    text = [*prompt_of(lab, int(name)), *tokens]
    blocks = list(range(1, 1 + BLOCKS_PER_REQUEST))
    logits = whole.forward(pack_spans([SpanRows(text, 0, blocks, 1)], lab.block_size)).require_logits()
    return abs((logits[0, one] - logits[0, other]).item())


class HostStaged:
    """`Collectives` of ranks that share a GPU: each operation goes through host memory.

    Args:
        group: over gloo.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        host = tensor.cpu()
        self._group.all_reduce(host)
        tensor.copy_(host)

    def broadcast(self, tensor: torch.Tensor) -> None:
        host = tensor.cpu()
        self._group.broadcast(host)
        tensor.copy_(host)

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        found = self._group.gather_logits(local.cpu(), columns)
        return None if found is None else found.to(local.device)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


class StagedShard(TargetShard):
    """A shard whose device another shard uses as well."""

    def _meet(self, port: int) -> Collectives:
        size, host = self.config.tensor_parallel_size, torch.device("cpu")
        store = self._store if self._store is not None else open_store(port=port, size=size, master=False)
        return HostStaged(Group.connect(rank=self.rank, size=size, store=store, device=host, timeout_s=PEER_TIMEOUT_S))


class PipeShard:
    """`ShardCalls` on a shard in another process.

    Args:
        pipe: to `_follow`.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def open_rendezvous(self) -> int:
        return int(await self._call("open_rendezvous"))

    async def load(self, rendezvous_port: int | None) -> ShardReady:
        ready: ShardReady = await self._call("load", rendezvous_port)
        return ready

    async def measure(self) -> int:
        return int(await self._call("measure"))

    async def allocate(self, num_blocks: int, max_model_len: int) -> None:
        await self._call("allocate", num_blocks, max_model_len)

    async def forward_handle(self, rank: int) -> ForwardHandle:
        handle: ForwardHandle = await self._call("forward_handle", rank)
        return handle

    async def follow(self, handle: ForwardHandle) -> None:
        await self._call("follow", handle)

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        if not await asyncio.to_thread(self._pipe.poll, 2 * HUNG_S):
            raise CheckFailed(f"the second rank does not respond to {name}")
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result


def _follow(pipe: Connection, config: EngineConfig, folder: Path, device: str) -> None:
    """Rank 1: what the pipe asks for, then every forward of rank 0."""
    shard = StagedShard(config, folder, rank=1, node_id=NODE, device=torch.device(device))
    while True:
        name, arguments = pipe.recv()
        if name == "run":
            shard.run()
            return
        try:
            pipe.send(getattr(shard, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - it is raised in the other process
            pipe.send(error)


def settings(lab: Lab, folder: Path, size: int) -> EngineConfig:
    """Settings of a target of `size` shards."""
    return EngineConfig.parse(
        {
            "model": str(folder),
            "device": lab.device.type,
            "dtype": lab.pick("bfloat16", "float32"),
            "tensor_parallel_size": size,
            "block_size": lab.block_size,
            "kv_cache_tokens": BLOCKS_PER_REQUEST * STREAMS * lab.block_size,
            "max_num_requests": STREAMS,
            "max_step_tokens": lab.pick(4096, 1024),
            "kernel": "torch",
            "speculative": {"method": "none"},
        }
    )
