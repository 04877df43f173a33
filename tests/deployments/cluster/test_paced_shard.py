"""Rank 0 with its pace over a tiny model: what it measures, reports and counts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_models import write_gguf_model
from native_library import needs_library
from tiny_models import write_model

from autoscale.profiling.table_cache import TableCache
from deployments.cluster.paced_shard import PacedShard, cost_identity
from engine.checkpoint.store import gguf_folder
from engine.config import EngineConfig
from engine.core.pacing import SpeculationPlan
from engine.ipc.wire import HEADER, DraftStatus, decode_event, frame_len
from engine.messages import SamplingParams, Submit
from engine.workers.bring_up import bring_up_locally
from engine.workers.draft_worker import DraftWorker
from engine.workers.target_shard import TargetShard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("paced"), "llama")


def shard_of(
    folder: Path, *, kv_block_size: int = 16, engine: dict[str, object] | None = None, **speculative: object
) -> TargetShard:
    config = EngineConfig.parse(
        {
            "model": str(folder),
            "device": "cpu",
            "dtype": "float32",
            "kv_cache_tokens": 4096,
            "block_size": kv_block_size,
            "num_threads": 1,
            "speculative": {"method": "ngram", "ngram_min": 1, "k": 3, "policy": "fixed", **speculative},
        }
        | (engine or {})
    )
    shard = TargetShard(config, folder, rank=0, node_id="here")
    bring_up_locally([shard])
    return shard


@contextmanager
def paced_over(shard: TargetShard, cost_folder: Path, **options: float) -> Iterator[PacedShard]:
    """A paced shard that is stepped by hand; its socket is closed afterwards."""
    paced = PacedShard(shard, cost_folder, **options)
    yield paced
    shard.stop()
    paced.leader.run()


def run_requests(paced: PacedShard, *, count: int, max_tokens: int) -> None:
    """Step the engine by hand until so many greedy requests are done."""
    engine = paced.leader.engine
    for index in range(count):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.submit(Submit(request_id=str(index), prompt=(5, 6, 7 + index), sampling=sampling))
    engine.drain()
    while engine.has_work:
        engine.step()


def test_a_new_machine_is_measured_and_the_table_kept(folder: Path, tmp_path: Path) -> None:
    shard = shard_of(folder)
    costs = TableCache(tmp_path, cost_identity(shard))
    assert costs.load() is None
    with paced_over(shard, tmp_path):
        pass
    kept = costs.load()
    assert kept is not None
    assert all(seconds > 0 for seconds in kept.verify_s)
    assert set(kept.pass_s) == {0.0}, "there is no draft to measure"


def test_a_table_that_no_longer_holds_is_measured_again(folder: Path, tmp_path: Path) -> None:
    shard = shard_of(folder)
    with paced_over(shard, tmp_path):
        pass
    costs = TableCache(tmp_path, cost_identity(shard))
    kept = costs.load()
    assert kept is not None
    costs.store(replace(kept, verify_s=(1000.0,) * len(kept.verify_s)))
    with paced_over(shard, tmp_path):
        pass
    measured = costs.load()
    assert measured is not None
    assert max(measured.verify_s) < 1000.0


def test_what_steps_teach_is_kept_for_the_next_start(folder: Path, tmp_path: Path) -> None:
    """Only steps show what a step costs besides its forward."""
    shard = shard_of(folder)
    costs = TableCache(tmp_path, cost_identity(shard))
    with paced_over(shard, tmp_path, costs_period_s=0.0) as paced:
        first = costs.load()
        paced.fold()
        assert costs.load() == first, "no step, nothing learned"
        run_requests(paced, count=3, max_tokens=10)
        paced.fold()
        kept = costs.load()
    assert first is not None
    assert kept is not None
    assert first.overhead_s == 0.0
    assert kept.overhead_s > 0.0


def test_a_cost_table_belongs_to_the_settings_that_change_a_step(folder: Path) -> None:
    one, other = (cost_identity(shard_of(folder, kv_block_size=size)) for size in (16, 32))
    assert one | {"block_size": "32"} == other
    assert one["kernel"] == "Decoder"
    assert one["draft"] == "None"
    assert one["packed"] == ""


@needs_library
def test_packed_and_dequantised_weights_have_cost_tables_of_their_own(tmp_path: Path) -> None:
    file = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", "Q4_1")
    folder = gguf_folder(file, tmp_path / "cache")
    one, other = (
        cost_identity(shard_of(folder, engine={"dtype": "bfloat16", "packed": packed})) for packed in ("auto", "off")
    )
    assert one == other | {"packed": "packed 4-bit"}


def test_what_the_steps_did_is_counted_and_reported_once(folder: Path, tmp_path: Path) -> None:
    with paced_over(shard_of(folder), tmp_path) as paced:
        assert paced.slot.current == SpeculationPlan(version=1, policy="fixed", max_k=3)
        run_requests(paced, count=3, max_tokens=10)
        observation = paced.take_observation()
        assert observation.num_emitted == 30
        assert observation.num_drafted > 0
        assert paced.take_observation().num_steps == 0
        paced.fold()
        snapshot = paced.metrics()
        assert snapshot.number("paceline_emitted_tokens_total") == 30
        assert snapshot.number("paceline_drafted_tokens_total") == observation.num_drafted
        assert snapshot.number("paceline_running_requests") == 0
        assert snapshot.number("paceline_kv_used_blocks", "target") == 0
        assert snapshot.number("paceline_kv_free_blocks", "target") == 4096 // 16
        assert snapshot.number("paceline_kv_evictions_total", "target") == 0


def test_the_load_is_that_since_the_last_call(folder: Path, tmp_path: Path) -> None:
    with paced_over(shard_of(folder), tmp_path) as paced:
        engine = paced.leader.engine
        engine.submit(Submit(request_id="r", prompt=(5, 6), sampling=SamplingParams(temperature=0.0, max_tokens=30)))
        engine.drain()
        assert paced.replica_load().num_waiting == 1
        engine.step()
        first, second = paced.replica_load(), paced.replica_load()
        assert (first.num_running, first.num_waiting) == (1, 0)
        assert first.tokens_per_s > 0
        assert second.tokens_per_s == 0, "nothing was emitted in between"
        assert all(seconds > 0 for seconds in second.tpot_s)
        assert paced.metrics().number("paceline_running_requests") == 1
        assert paced.metrics().number("paceline_kv_used_blocks", "target") == 1


def test_the_heartbeat_stands_still_only_with_the_loop(folder: Path, tmp_path: Path) -> None:
    shard = shard_of(folder)
    paced = PacedShard(shard, tmp_path)
    assert paced.heartbeat() == 0
    ran = threading.Event()
    paced.leader.engine.call(ran.set)
    thread = threading.Thread(target=paced.leader.run, daemon=True)
    thread.start()
    assert ran.wait(30)
    shard.stop()
    thread.join(30)
    assert paced.heartbeat() >= 1


def test_a_draft_is_timed_before_it_drafts(folder: Path, tmp_path: Path) -> None:
    shard = shard_of(folder, method="draft_model", draft=str(folder), deadline_s=60)
    paced = PacedShard(shard, tmp_path)
    draft = DraftWorker(shard.config, folder, folder, node_id="here")
    draft.connect(paced.leader.open_draft_buffer(draft.load(), 1))
    threads = [threading.Thread(target=run, daemon=True) for run in (paced.leader.run, draft.run)]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(paced.leader.path)
        for thread in threads:
            thread.start()
        with connection.makefile("rb") as stream:
            paced.attach_measured_draft(30.0)
            event = decode_event(stream.read(frame_len(stream.read(HEADER.size))))
        assert event == DraftStatus(up=True, reason="")
        shard.stop()
        draft.stop()
        for thread in threads:
            thread.join(30)
    kept = TableCache(tmp_path, cost_identity(shard)).load()
    assert kept is not None
    assert all(seconds > 0 for seconds in kept.pass_s)
    assert kept.handoff_s > 0
    usage = draft.metrics()
    assert usage.number("paceline_kv_used_blocks", "draft") == 0, "the keys of the measurement were released"
    assert usage.number("paceline_kv_free_blocks", "draft") > 0
