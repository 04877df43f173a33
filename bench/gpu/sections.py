"""The parts of `paceline bench gpu` that need one process: kernels, forwards, whole engines.

Each part returns plain values for the report and raises `CheckFailed` where a result is wrong.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from bench.gpu.lab import CheckFailed, Lab
from bench.gpu.planted import local_drafter, local_link, planted_pair, weight_bytes
from engine.config import PolicyName
from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.drafter import Drafter, NoDrafter
from engine.core.engine import Engine
from engine.core.pacing import SpeculationPlan
from engine.core.packing import Forward, SpanRows, pack_spans
from engine.core.scheduler import Scheduler
from engine.core.verifier import Verifier
from engine.graphs.buckets import make_buckets
from engine.graphs.forward import GraphedForward
from engine.messages import Delta, SamplingParams, Submit
from engine.model.runner import ModelRunner
from engine.quantization.kv_cache import FP8, quantised

K = 4
BLOCKS_PER_REQUEST = 2
POLICIES: tuple[PolicyName, ...] = ("off", "fixed", "goodput")


def kernels(lab: Lab) -> dict[str, Any]:
    """Each Triton kernel against its twin: largest difference, seconds, and share of the measured bandwidth."""
    if importlib.util.find_spec("triton") is None:
        return {"skipped": "Triton is not installed"}
    from engine.kernels import elementwise as e
    from engine.kernels.paged_attention import paged_attention, paged_attention_reference

    rows, size, inner = lab.pick((64, 4096, 14_336), (3, 32, 48))
    dtype = lab.pick(torch.bfloat16, torch.float32)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=lab.device).to(dtype)

    hidden, delta, weight, gate, up = (
        some(rows, size),
        some(rows, size),
        some(size),
        some(rows, inner),
        some(rows, inner),
    )
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = {
        "add_rms_norm": (e.add_rms_norm, e.add_rms_norm_reference, (hidden, delta, weight, 1e-5), 4 * hidden.nbytes),
        "silu_mul": (e.silu_mul, e.silu_mul_reference, (gate, up), 3 * gate.nbytes),
    }
    heads, kv_heads, dim, spans, kv_len = lab.pick((32, 8, 128, 32, 4096), (4, 2, 16, 2, 300))
    width = -(-kv_len // lab.block_size)
    query, cu_q = some(spans, heads, dim), torch.arange(spans + 1, dtype=torch.int32, device=lab.device)
    lens, tables = torch.full_like(cu_q[1:], kv_len), torch.arange(spans * width, dtype=torch.int32, device=lab.device)
    cache = [some(spans * width, lab.block_size, kv_heads, dim) for _ in range(2)]
    for name, pair in (("attention", cache), ("attention, FP8 cache", [quantised(each, FP8) for each in cache])):
        given = (query, *pair, cu_q, lens, tables.view(spans, width), None, None, 1, kv_len)
        cases[name] = (paged_attention, paged_attention_reference, given, 2 * pair[0].nbytes)
    report: dict[str, Any] = {}
    for name, (kernel, twin, arguments, num_bytes) in cases.items():
        run = twin if lab.dry else kernel
        results = []
        for function in (run, twin):
            copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
            returned = function(*copies)
            results.append(copies[0] if returned is None else returned)
        difference = (results[0].float() - results[1].float()).abs().max().item()
        if not difference <= 0.05 * results[1].float().abs().max().item():
            raise CheckFailed(f"{name} differs from its twin by {difference:g}")
        kernel_s, twin_s = (lab.seconds(partial(function, *arguments)) for function in (run, twin))
        report[name] = {
            "difference": difference,
            "kernel_s": kernel_s,
            "twin_s": twin_s,
            "of_bandwidth": num_bytes / max(kernel_s, 1e-9) / lab.bandwidth,
        }
    return report


def forwards(lab: Lab) -> dict[str, Any]:
    """The forward of an 8B shape, eager and recorded, over the time to read its weights once."""
    target, _ = planted_pair(lab)
    max_requests = lab.pick(64, 3)
    runner = ModelRunner(target, num_blocks=1 + max_requests, block_size=lab.block_size)
    begin = time.perf_counter()
    buckets = make_buckets(max_requests=max_requests, max_k=K)
    ids = max_requests * K
    graphs = GraphedForward(runner, buckets, lab.capture(), max_kv=lab.block_size, max_ids=ids)
    floor_s = weight_bytes(target) / lab.bandwidth
    report: dict[str, Any] = {
        "recording_s": time.perf_counter() - begin,
        "num_recorded": len(buckets),
        "floor_s": floor_s,
        "sizes": [],
    }
    for requests, q_len in lab.pick(((1, 1), (1, 5), (8, 1), (8, 5), (64, 1), (64, 5)), ((1, 1), (2, 5))):
        spans = [SpanRows([1 + i] * q_len, 8, [1 + i], q_len) for i in range(requests)]
        plan = pack_spans(spans, lab.block_size)
        eager = runner.forward(plan).require_logits().clone()
        found = graphs.forward(plan).require_logits()
        difference = (found - eager).abs().max().item()
        if not difference <= 0.05 * eager.abs().max().item():
            raise CheckFailed(
                f"{requests} x {q_len} rows: the recorded forward differs from the eager one by {difference:g}"
            )
        eager_s = lab.seconds(partial(runner.forward, plan))
        graph_s = lab.seconds(partial(graphs.forward, plan))
        report["sizes"].append(
            {"requests": requests, "q_len": q_len, "eager_s": eager_s, "graph_s": graph_s, "difference": difference}
        )
    return report


def engines(lab: Lab) -> dict[str, Any]:
    """Greedy output and tokens per second of whole engines, with planted acceptance, under each policy."""
    target, draft = planted_pair(lab)
    cells: list[dict[str, Any]] = []
    different = 0
    for streams in lab.pick((1, 4, 16, 64, 256), (1, 3)):
        expected: dict[str, list[int]] = {}
        for policy in POLICIES:
            if lab.left_s < 0:
                cells.append({"streams": streams, "policy": policy, "skipped": "the time is up"})
                continue
            num_blocks = 1 + BLOCKS_PER_REQUEST * streams
            drafter: Drafter = NoDrafter()
            if policy != "off":
                link = local_link(lab, draft, num_blocks=num_blocks, max_rows=streams, max_k=K)
                drafter = local_drafter(link, max_rows=streams)
            runner = ModelRunner(target, num_blocks=num_blocks, block_size=lab.block_size)
            plan = SpeculationPlan(policy=policy, max_k=K)
            pacer = PolicyPacer(make_goodput("draft_model", K))
            cell, tokens = run_engine(lab, runner.forward, drafter, pacer, plan, streams=streams, num_blocks=num_blocks)
            expected = expected or tokens
            parted = sum(tokens[name] != expected[name] for name in tokens)
            different += parted
            cells.append(cell | {"different_outputs": parted})
    if lab.dry and different:
        raise CheckFailed(f"{different} greedy outputs depend on the policy")
    # On a GPU the order of additions depends on the number of rows, so outputs may part at near-ties.
    return {"cells": cells, "different_outputs": different}


def prompt_of(lab: Lab, number: int) -> tuple[int, ...]:
    """The prompt of a request of `run_engine`, whose id is its number."""
    return tuple((7 * number + 3 * i) % 61 for i in range(lab.pick(32, 4)))


def run_engine(
    lab: Lab,
    forward: Forward,
    drafter: Drafter,
    pacer: PolicyPacer,
    plan: SpeculationPlan,
    *,
    streams: int,
    num_blocks: int,
    max_tokens: int | None = None,
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Tokens per second, acceptance and mean K of one engine, and the tokens of each of its requests.

    Args:
        lab: gives block size and clock.
        forward: of the target.
        drafter: of the engine.
        pacer: chooses K; it goes on learning.
        plan: in force.
        streams: requests, all from the start.
        num_blocks: KV blocks of the target, the scratch block included.
        max_tokens: length of each response; None takes 96, or 8 in a dry run.
    """
    tokens: dict[str, list[int]] = {}
    last: dict[str, Delta] = {}

    def publish(deltas: tuple[Delta, ...]) -> None:
        for delta in deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            last[delta.request_id] = delta

    pool = BlockPool(num_blocks, lab.block_size, prefix_cache=False)
    max_len = BLOCKS_PER_REQUEST * lab.block_size - 1
    scheduler = Scheduler(
        pool,
        pacer=pacer,
        plan=lambda: plan,
        max_num_requests=streams,
        max_step_tokens=4096,
        max_model_len=max_len,
    )
    engine = Engine(
        scheduler=scheduler,
        drafter=drafter,
        verifier=Verifier(forward, block_size=lab.block_size, acceptance="together", clock=lab.clock()),
        committer=Committer(pool, scheduler, max_model_len=max_len),
        publish=publish,
        pacer=pacer,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens or lab.pick(96, 8))
    for number in range(streams):
        engine.submit(Submit(request_id=str(number), prompt=prompt_of(lab, number), sampling=sampling))
    engine.drain()
    engine.step()  # The prompts, and what is loaded at first use.
    begin, before = time.perf_counter(), sum(map(len, tokens.values()))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begin
    drafted, accepted = (sum(getattr(d, name) for d in last.values()) for name in ("num_drafted", "num_accepted"))
    num_tokens = sum(map(len, tokens.values()))
    rate, num_choices = (num_tokens - before) / seconds, num_tokens - accepted - streams
    return {
        "streams": streams,
        "policy": plan.policy,
        "tokens_per_s": rate,
        "itl_s": streams / rate if rate else 0.0,
        "acceptance": accepted / drafted if drafted else None,
        "mean_k": drafted / num_choices if num_choices > 0 else 0.0,
    }, tokens
