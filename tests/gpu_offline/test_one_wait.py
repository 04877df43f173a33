"""A whole step of a GPU engine waits for the device once, in every sampling mode, with both kinds of draft.

Checked with fake CUDA tensors through the real shard and its clock: mixing of devices or element types raises, blocking
reads are counted, waiting for an event included.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from fake_steps import MODES, K, batch_of, fake_proposer, fake_shard, request_rows, verifier_of
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B

from engine.core.step import Draft, DraftRow
from engine.errors import ShardDown
from engine.messages import SamplingParams
from engine.sampling.readback import DeviceClock

TARGETS = {"llama-8b": (LLAMA_8B, 1), "qwen3-8b": (QWEN3_8B, 1), "llama-70b tp 4": (LLAMA_70B, 4)}


@pytest.mark.parametrize(
    ("target", "mode"), [*(("llama-8b", mode) for mode in MODES), *((target, "all") for target in TARGETS)]
)
def test_a_step_without_a_draft_model_waits_once(target: str, mode: str) -> None:
    """Certain drafts, as prompt lookup and grammars make them."""
    shape, tp = TARGETS[target]
    modes = list(MODES.values()) if mode == "all" else [MODES[mode]] * 3
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp)
        batch = batch_of([SamplingParams(**m) for m in modes], K, vocab_size=shape["vocab_size"])
        draft = Draft(tuple(DraftRow((ord("b"),) * (K if index % 2 else 0)) for index in range(len(modes))))
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        verdict = verify(batch, draft)
        assert len(verdict.rows) == len(modes)
        assert recorder.reads == {"event": 1}
        assert recorder.downloads == 1
        assert verdict.verify_s == 1e-3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["llama-1b", "eagle"])
def test_a_step_with_a_draft_model_waits_once(target: str, kind: str) -> None:
    shape, tp = TARGETS[target]
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp, feature_layers=(0, 1, 2))
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=shape["vocab_size"])
        proposer, features = fake_proposer(kind, shape)
        probs = torch.empty(len(batch.spans), K, shape["vocab_size"], device=CUDA)
        found = proposer.propose(request_rows(kind, batch), [], probs, features)
        assert all(len(row.token_ids) == K for row in found)
        draft = Draft(
            tuple(
                DraftRow(row.token_ids, probs[place, :K] if row.has_probs else None) for place, row in enumerate(found)
            )
        )
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        verdict = verify(batch, draft)
        assert len(verdict.rows) == len(batch.spans)
        assert verdict.features is not None
        assert recorder.reads == {"event": 1}


@pytest.mark.parametrize("tp", [1, 4])
def test_a_step_that_reads_nothing_waits_as_well(tp: int) -> None:
    """A prefill chunk has no logits. Its wait is what notices a hung peer, and it ends the measured time."""
    with fake_cuda() as recorder:
        shard = fake_shard(LLAMA_8B if tp == 1 else LLAMA_70B, tp=tp)
        batch = batch_of([SamplingParams(temperature=0.0)], 0, samples=False)
        verdict = verifier_of(shard, recorder).verify(batch, Draft((DraftRow(),)))
        assert verdict.rows[0].token_ids == ()
        assert recorder.reads == {"event": 1}


class Hung:
    """An event that the device never reaches."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Any) -> float:
        raise AssertionError("there is no time of an event that was not reached")


def test_a_hung_peer_ends_a_step_without_logits_within_the_deadline() -> None:
    aborted: list[bool] = []
    clock = DeviceClock(timeout_s=0.05, abort=lambda: aborted.append(True), new_event=Hung)
    clock.begin()
    clock.forwarded()
    begin = time.monotonic()
    with pytest.raises(ShardDown, match=r"did not finish a step within 0\.05 s"):
        clock.read([])
    assert aborted == [True]
    assert time.monotonic() - begin < 5
