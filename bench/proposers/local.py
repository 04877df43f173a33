"""One target in this process, and an engine for each proposer that drafts for it.

Owns the engines and the loop. There is no Ray, no socket and no HTTP, so that what is measured is the engine's steps.
The KV cache and its prefix cache are those of the target and outlive the engines: a prompt is computed once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoscale.control.controller import initial_plan
from autoscale.policy.cost_model import CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from autoscale.profiling.profile import profile_draft, profile_target
from bench.proposers.draft_process import draft_process
from bench.proposers.variants import Variant
from engine.checkpoint.draft_check import check_draft
from engine.config import MAX_K, EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.drafter import Drafter
from engine.core.engine import Engine
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats
from engine.core.step import Batch, Draft
from engine.core.verifier import Verifier
from engine.draft.messages import DraftInfo, DraftRequestRow, DraftResponse
from engine.draft.methods import make_drafter
from engine.draft.remote import RemoteDrafter
from engine.draft_buffer.target_endpoint import TargetEndpoint
from engine.errors import EngineUnavailable
from engine.messages import Delta, SamplingParams, Submit
from engine.model.device import set_threads
from engine.workers.bring_up import bring_up_locally
from engine.workers.draft_connection import MAX_RELEASED, MAX_REQUEST_TOKENS
from engine.workers.target_shard import TargetShard

NODE = "bench"
DEADLINE_S = 30.0
"""Seconds after which a silent draft counts as hung. Long, because a busy machine may stop it for a while."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run yielded."""

    stats: tuple[StepStats, ...]
    """Of each step."""
    draft_s: tuple[float, ...]
    """Seconds of the drafting phase of each step, lookups and handoff included."""
    tokens: tuple[tuple[int, ...], ...]
    """Generated tokens of each prompt."""


class _Timed:
    """A drafter whose drafting is timed.

    Args:
        drafter: drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seconds: list[float] = []
        self.committed, self.forget = drafter.committed, drafter.forget

    def draft(self, batch: Batch) -> Draft:
        begin = time.perf_counter()
        draft = self._drafter.draft(batch)
        self.seconds.append(time.perf_counter() - begin)
        return draft


class _Made:
    """The engine of a variant, and where its steps and tokens go.

    Args:
        drafter: of the engine.
    """

    engine: Engine

    def __init__(self, drafter: _Timed) -> None:
        self.drafter = drafter
        self.stats: list[StepStats] = []
        self.tokens: dict[str, list[int]] = {}
        self.running: set[str] = set()

    def publish(self, deltas: tuple[Delta, ...]) -> None:
        """Take the deltas of one step."""
        for delta in deltas:
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.running.discard(delta.request_id)


class Bench:
    """A target that all drafts fit, and their processes. Made by `open_bench`.

    Args:
        shard: the target, with the features of `draft`.
        endpoint: of the draft's buffer; None for a target without one.
        info: about the draft.
    """

    def __init__(self, shard: TargetShard, endpoint: TargetEndpoint | None, info: DraftInfo | None) -> None:
        self._shard = shard
        config = shard.config
        self._endpoint = endpoint
        self._info = info
        # One for all engines: it keeps the moves of accepted paths for the next forward, whichever engine runs it.
        self._verifier = Verifier(shard.forward, block_size=config.kv_block_size, clock=shard.step_clock())
        self._table: CostTable | None = None
        self._engines: dict[str, _Made] = {}
        self._pool = BlockPool(shard.runner.num_blocks, config.kv_block_size, prefix_cache=True)
        set_threads(config, own_threads=shard.runner.model.own_threads)

    def run(
        self, variant: Variant, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, *, streams: int
    ) -> Seen:
        """Generate for all prompts in a closed loop. What a variant has learnt in earlier runs is kept.

        Args:
            variant: its draft must be that of this target, or none.
            prompts: token ids.
            sampling: of every request.
            streams: requests in flight.

        Returns:
            What was seen.
        """
        made = self._engines.get(variant.name)
        if made is None:
            made = self._engines[variant.name] = self._make(variant)
        made.stats.clear()
        made.drafter.seconds.clear()
        made.tokens = {str(index): [] for index in range(len(prompts))}
        made.running.clear()
        waiting = list(enumerate(prompts))[::-1]
        while waiting or made.running:
            while waiting and len(made.running) < streams:
                index, prompt = waiting.pop()
                made.running.add(str(index))
                made.engine.submit(Submit(request_id=str(index), prompt=prompt, sampling=sampling, client="bench"))
            made.engine.drain()
            made.engine.step()
        tokens = tuple(tuple(each) for each in made.tokens.values())
        return Seen(tuple(made.stats), tuple(made.drafter.seconds), tokens)

    def prepare(self, variant: Variant) -> None:
        """Make the engine of a variant. The costs that its policy needs are timed, which overwrites the KV cache."""
        self._engines[variant.name] = self._make(variant)

    def _make(self, variant: Variant) -> _Made:
        made = _Made(self._drafter(variant))
        made.engine = self._engine(variant, made)
        return made

    def _drafter(self, variant: Variant) -> _Timed:
        remote = self._remote(variant) if variant.draft is not None else None
        vocab_size = self._shard.runner.model.config.vocab_size
        return _Timed(make_drafter(variant.settings, remote, vocab_size=vocab_size, branches=variant.width > 1))

    def _engine(self, variant: Variant, made: _Made) -> Engine:
        shard, pool, speculative = self._shard, self._pool, variant.settings
        config = shard.config
        goodput = make_goodput(
            speculative.method,
            speculative.k,
            *([self._costs()] if speculative.policy == "goodput" else []),
            lookup=speculative.lookup,
        )
        plan, pacer = initial_plan(speculative), PolicyPacer(goodput)
        max_len = shard.max_model_len
        limits = {"max_num_requests": config.max_num_requests, "max_step_tokens": config.max_step_tokens}
        scheduler = Scheduler(pool, pacer=pacer, plan=lambda: plan, max_model_len=max_len, **limits)
        return Engine(
            scheduler=scheduler,
            drafter=made.drafter,
            verifier=self._verifier,
            committer=Committer(pool, scheduler, max_model_len=max_len),
            publish=made.publish,
            pacer=pacer,
            observers=[lambda step, _: made.stats.append(step)],
        )

    def _remote(self, variant: Variant) -> RemoteDrafter:
        if self._endpoint is None or self._info is None:
            raise EngineUnavailable(f"{variant.name}: this target has no draft")
        remote = RemoteDrafter(
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_released=MAX_RELEASED,
            deadline_s=DEADLINE_S,
            on_down=_raise,
            width=variant.width,
        )
        remote.set_vocab(torch.tensor(self._info.vocab) if self._info.vocab is not None else None)
        remote.attach(_Kept(self._endpoint))
        return remote

    def _costs(self) -> CostTable:
        """Costs of the target and of its draft, timed once."""
        if self._table is None:
            shard = self._shard
            table = profile_target(
                shard.timed_forward,
                block_size=shard.config.kv_block_size,
                num_blocks=shard.runner.num_blocks,
                max_rows=shard.config.max_step_tokens,
                max_spans=shard.config.max_num_requests,
                vocab_size=shard.runner.model.config.vocab_size,
            )
            shard.runner.clear()
            if self._endpoint is not None:
                max_rows = shard.config.max_num_requests
                table = profile_draft(_Kept(self._endpoint).ask_first, table, max_rows=max_rows, max_k=MAX_K)
            self._table = table
        return self._table


class _Kept:
    """The endpoint of a draft that several engines use one after the other: closing it does nothing.

    Args:
        endpoint: of the draft's buffer.
    """

    def __init__(self, endpoint: TargetEndpoint) -> None:
        self._endpoint = endpoint
        self.probs, self.features = endpoint.probs, endpoint.features
        self.ask, self.drafted, self.mark_step = endpoint.ask, endpoint.drafted, endpoint.mark_step

    def ask_first(self, rows: Sequence[DraftRequestRow], released: Sequence[int]) -> DraftResponse:
        """Ask before there is any request: every token reads the first row of features."""
        if self.features is not None:
            rows = [replace(row, feature_rows=(0,) * len(row.new_tokens)) for row in rows]
        return self._endpoint.ask(rows, released, deadline_s=DEADLINE_S)

    def close(self) -> None:
        """Do nothing."""


def _raise(reason: str) -> None:
    raise EngineUnavailable(f"the draft is down: {reason}")


@contextlib.contextmanager
def open_bench(settings: Mapping[str, Any], folder: Path, draft_folder: Path | None) -> Iterator[Bench]:
    """A target, and its draft in another process.

    Args:
        settings: fields of `EngineConfig` besides `speculative`.
        folder: of the target.
        draft_folder: of the draft; None for none.
    """
    draft = check_draft(draft_folder, folder) if draft_folder is not None else None
    speculative = (
        {"method": "none"} if draft is None else {"draft": str(draft_folder), "method": draft.architecture, "k": MAX_K}
    )
    config = EngineConfig.parse({**settings, "speculative": speculative})
    layers = draft.feature_layers if draft is not None else ()
    shard = TargetShard(config, folder, rank=0, node_id=NODE, feature_layers=layers)
    bring_up_locally([shard])
    try:
        if draft_folder is None:
            yield Bench(shard, None, None)
            return
        with draft_process(shard, draft_folder, node_id=NODE) as (endpoint, info):
            yield Bench(shard, endpoint, info)
    finally:
        shard.close()
