"""Real targets that fail in the middle of a step and are replaced while clients read, with real sockets and loops.

Promise: every response has exactly the tokens of a target that never failed, whichever step fails and however often.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import write_model

from autoscale.control.controller import initial_plan
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from deployments.cluster.backoff import Backoff
from deployments.cluster.failover import MAX_ENGINES, ContinuedEngine
from deployments.cluster.shard_client import ShardClient
from deployments.cluster.target_supervisor import TargetSupervisor
from deployments.engine_client import Health
from engine.config import EngineConfig
from engine.core.step import ForwardInput, ForwardResult
from engine.errors import EngineUnavailable, ShardDown
from engine.messages import SamplingParams, Submit
from engine.workers.bring_up import LocalShard, bring_up
from engine.workers.leader import Leader
from engine.workers.shard_ready import ShardReady
from engine.workers.target_shard import TargetShard


class FailingShard(TargetShard):
    """A shard that fails after `life` forwards."""

    life: int | None = None

    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        if self.life is not None:
            self.life -= 1
            if self.life < 0:
                raise ShardDown("rank 1 is gone")
        return super().forward(forward_input)


class LocalTarget:
    """A shard in a thread of this process, and the connection to it."""

    def __init__(self, config: EngineConfig, folder: Path, life: int | None, on_failed: Callable[[str], None]) -> None:
        self._shard = FailingShard(config, folder, rank=0, node_id="here")
        self._shard.life = life
        self._on_failed = on_failed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: str | None = None

    def _run(self) -> None:
        try:
            self._leader.run()
        except ShardDown:
            return

    async def start(self) -> ShardReady:
        config = self._shard.config
        ready = await bring_up([LocalShard(self._shard)], block_size=config.kv_block_size)
        plan = initial_plan(config.speculative)
        pacer = PolicyPacer(make_goodput(config.speculative.method, config.speculative.k))
        self._leader = Leader(self._shard, pacer=pacer, plan=lambda: plan)
        self._thread.start()
        self.client = await ShardClient.connect(self._leader.path, on_draft=print, on_lost=self._fail)
        return ready

    async def stop(self) -> None:
        self._shard.stop()
        await self.client.close()
        await asyncio.to_thread(self._thread.join, 10)
        assert not self._thread.is_alive()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self._on_failed(reason)


class Targets:
    """Provides engines to `ContinuedEngine`.

    Args:
        lives: forwards of each target before it fails; later targets never fail.
    """

    def __init__(self, folder: Path, lives: list[int]) -> None:
        self._folder = folder
        self._lives = list(lives)
        self.config = EngineConfig.parse(
            {
                "model": str(folder),
                "device": "cpu",
                "dtype": "float32",
                "kv_cache_tokens": 1024,
                "num_threads": 1,
                "speculative": {"method": "ngram", "policy": "fixed", "k": 3, "ngram_min": 1},
            }
        )
        self.supervisor = TargetSupervisor(
            self._make,
            before=_nothing,
            after=lambda: None,
            start_timeout_s=30.0,
            backoff=Backoff(first_s=0, longest_s=0),
        )

    def _make(self, on_failed: Callable[[str], None]) -> LocalTarget:
        return LocalTarget(self.config, self._folder, self._lives.pop(0) if self._lives else None, on_failed)

    async def client(self, timeout_s: float) -> ShardClient:
        return (await self.supervisor.wait(timeout_s)).client

    async def health(self) -> Health:
        return Health(status="ok")


async def _nothing() -> None:
    return None


async def generate_all(targets: Targets, submits: list[Submit]) -> dict[str, list[int] | str]:
    """The tokens of each request, or its error message."""
    await targets.supervisor.start()
    task = asyncio.create_task(targets.supervisor.supervise())
    engine = ContinuedEngine(targets, patience_s=30.0)

    async def one(submit: Submit) -> list[int] | str:
        try:
            deltas = [delta async for delta in engine.generate(submit)]
        except EngineUnavailable as error:
            return str(error)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        return [token for delta in deltas for token in delta.token_ids]

    try:
        responses = await asyncio.wait_for(asyncio.gather(*(one(submit) for submit in submits)), 60)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await targets.supervisor.stop()
    return dict(zip([submit.request_id for submit in submits], responses, strict=True))


SUBMITS = [
    Submit(
        request_id=f"r{i}",
        prompt=tuple(range(3 + i, 9 + 2 * i)),
        sampling=SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            max_tokens=10 + 3 * i,
            frequency_penalty=0.5 * (i % 3),
            num_logprobs=1,
        ),
    )
    for i in range(5)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lives"), "llama")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, list[int] | str]:
    return asyncio.run(generate_all(Targets(folder, []), SUBMITS))


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lives=st.lists(st.integers(0, 15), min_size=1, max_size=MAX_ENGINES - 1))
def test_answers_are_those_of_a_target_that_never_failed(
    folder: Path, undisturbed: dict[str, list[int] | str], lives: list[int]
) -> None:
    assert asyncio.run(generate_all(Targets(folder, lives), SUBMITS)) == undisturbed


def test_a_request_that_every_target_dies_of_ends_with_an_error(folder: Path) -> None:
    submits = [replace(SUBMITS[0], request_id="poison")]
    responses = asyncio.run(generate_all(Targets(folder, [2] * (MAX_ENGINES + 1)), submits))
    assert "rank 1 is gone" in str(responses["poison"])
