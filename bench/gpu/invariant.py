"""The batch-invariant kernels on a device: greedy text is the same in every batch, with a draft and without.

Also their cost: the forward beside the one of PyTorch's operators. A dry run goes through it with PyTorch's operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from bench.gpu.lab import CheckFailed, Lab
from bench.gpu.planted import SHAPE_DRY, SHAPE_SMALL, local_drafter, local_link, planted_pair
from bench.gpu.sections import BLOCKS_PER_REQUEST, run_engine
from engine.core.drafter import Drafter, NoDrafter
from engine.core.pacing import SpeculationPlan
from engine.core.packing import SpanRows, pack_spans
from engine.model.attention import make_attention
from engine.model.collectives import Solo
from engine.model.decoder import Decoder
from engine.model.device import Compute
from engine.model.runner import ModelRunner

K = 4
STREAMS = (8, 1, 3)


def invariant(lab: Lab) -> dict[str, Any]:
    """Outputs that differ between batches, of which there must be none, and seconds of forwards."""
    plain, draft = planted_pair(lab, shape=lab.pick(SHAPE_SMALL, SHAPE_DRY))
    target = plain if lab.dry else _invariant(lab, plain)
    expected: dict[str, list[int]] = {}
    different = set()
    for streams in STREAMS:
        for k in (0, K):
            num_blocks = 1 + BLOCKS_PER_REQUEST * streams
            drafter: Drafter = NoDrafter()
            if k:
                link = local_link(lab, draft, num_blocks=num_blocks, max_rows=streams, max_k=K)
                drafter = local_drafter(link, max_rows=streams)
            runner = ModelRunner(target, num_blocks=num_blocks, block_size=lab.block_size)
            plan = SpeculationPlan(policy="fixed" if k else "off", max_k=k)
            pacer = PolicyPacer(make_goodput("draft_model", K))
            sizes = {"streams": streams, "num_blocks": num_blocks, "max_tokens": lab.pick(200, 12)}
            _, tokens = run_engine(lab, runner.forward, drafter, pacer, plan, **sizes)
            expected = expected or tokens
            different |= {name for name in tokens if tokens[name] != expected[name]}
    if different:
        raise CheckFailed(f"greedy outputs of requests {sorted(different)} depend on the batch or on the draft")
    return {"requests": len(expected), "forwards": [_seconds(lab, plain, target, *size) for size in ((1, 1), (8, 5))]}


def _invariant(lab: Lab, model: Decoder) -> Decoder:
    from engine.model.fused_decoder import InvariantDecoder  # Imports Triton.

    config = model.config
    group = config.num_heads // config.num_kv_heads
    attention = {0: make_attention("invariant", group_size=group, dtype=model.dtype, device=lab.device)}
    compute = Compute(model.dtype, lab.device, "invariant")
    return InvariantDecoder(config, model._weights, compute, collectives=Solo(), attention=attention, feature_layers=())


def _seconds(lab: Lab, plain: Decoder, target: Decoder, requests: int, q_len: int) -> dict[str, Any]:
    plan = pack_spans([SpanRows([1 + i] * q_len, 8, [1 + i], q_len) for i in range(requests)], lab.block_size)
    runners = {
        name: ModelRunner(model, num_blocks=1 + requests, block_size=lab.block_size)
        for name, model in (("torch", plain), ("invariant", target))
    }
    times = {f"{name}_s": lab.seconds(partial(runner.forward, plan)) for name, runner in runners.items()}
    return {"requests": requests, "q_len": q_len, **times}
