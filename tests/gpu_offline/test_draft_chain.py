"""A draft on a GPU: K positions without a read in between, one read per draft request, whatever is drafted for.

Checked with fake CUDA tensors. `tests/engine/draft/test_on_device.py` holds that the values are those of the loop.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
import torch
from fake_cuda import CUDA, Recorder, fake_cuda
from fake_steps import MODES, K, batch_of, fake_proposer, fake_shard, request_rows, verifier_of
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B

from engine.core.request import Request
from engine.core.step import DeviceDrafts, Draft, DraftRow
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.proposer import OnDevice
from engine.messages import SamplingParams
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_host

TARGETS = {"llama-8b": (LLAMA_8B, 1), "qwen3-8b": (QWEN3_8B, 1), "llama-70b tp 4": (LLAMA_70B, 4)}


def on_device(num_rows: int, read: Any = to_host) -> OnDevice:
    ids = torch.zeros(num_rows, K, dtype=torch.int32, device=CUDA)
    new_tokens = torch.zeros(4096, dtype=torch.int32, device=CUDA)
    return OnDevice(ids, torch.zeros(num_rows, K, device=CUDA), new_tokens, read)


def with_options(rows: list[DraftRequestRow], requests: list[Request]) -> list[DraftRequestRow]:
    """The rows with the options of requests that need no grammar, which a draft has to compile first."""
    out = []
    for row, request in zip(rows, requests, strict=True):
        processor = request.logits_processor
        options = processor.options if processor is not None and processor.matcher is None else None
        sampling = row.sampling
        out.append(
            DraftRequestRow(
                *(row.key, row.start, row.new_tokens, row.k, sampling), options, feature_rows=row.feature_rows
            )
        )
    return out


def propose(kind: str, shape: dict[str, Any], recorder: Recorder, k: int = K) -> tuple[Any, Any, OnDevice]:
    batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], k, vocab_size=shape["vocab_size"])
    proposer, features = fake_proposer(kind, shape)
    memory = on_device(len(batch.spans))
    probs = torch.empty(len(batch.spans), K, shape["vocab_size"], device=CUDA)
    rows = with_options(request_rows(kind, batch, k), [span.request for span in batch.spans])
    recorder.reads.clear()
    found = proposer.propose(rows, [], probs, features, memory)
    return batch, (found, probs), memory


@pytest.mark.parametrize("kind", ["llama-1b", "eagle", "parallel", "medusa"])
@pytest.mark.parametrize("k", [1, K])
def test_a_draft_request_is_read_once_at_every_k(kind: str, k: int) -> None:
    with fake_cuda() as recorder:
        _, (found, _), _ = propose(kind, LLAMA_8B, recorder, k)
        assert recorder.num_reads == 1, recorder.reads
        assert all(row.num_on_device == k for row in found)
        greedy, sampled, *_ = found
        assert (greedy.token_ids, greedy.confidences) == ((), ())
        assert sampled.has_probs


def test_a_further_token_of_a_parallel_draft_launches_no_forward() -> None:
    """Every further token of a chain launches a forward; one of a parallel draft only its choice."""
    launches = {}
    for kind in ("eagle", "parallel"):
        for k in (2, K):
            with fake_cuda() as recorder:
                batch = batch_of([SamplingParams(temperature=0.0)] * 3, k)
                proposer, features = fake_proposer(kind, LLAMA_8B)
                probs = torch.empty(3, K, LLAMA_8B["vocab_size"], device=CUDA)
                recorder.launches.clear()
                proposer.propose(request_rows(kind, batch, k), [], probs, features, on_device(3))
                launches[kind, k] = recorder.num_launches
    choosing = (launches["parallel", K] - launches["parallel", 2]) / (K - 2)
    assert choosing < (launches["eagle", K] - launches["eagle", 2]) / (K - 2) / 2
    assert launches["parallel", K] < launches["eagle", K]


def test_tokens_that_are_not_drafted_for_are_not_read() -> None:
    """A draft request that only catches up waits for nothing: the endpoint publishes its work."""
    with fake_cuda() as recorder:
        _, (found, _), _ = propose("llama-1b", LLAMA_8B, recorder, 0)
        assert recorder.num_reads == 0, recorder.reads
        assert all(row.num_on_device == 0 for row in found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["llama-1b", "eagle", "parallel", "medusa"])
def test_a_step_over_drafts_that_the_host_has_not_seen_waits_once(target: str, kind: str) -> None:
    """Every mode in one step; requests with options have their drafted tokens on the host as well."""
    shape, tp = TARGETS[target]
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp, feature_layers=(0, 1, 2))
        batch, (found, probs), memory = propose(kind, shape, recorder)
        drafts = DeviceDrafts(memory.token_ids.long(), memory.confidences, probs)
        draft = Draft(
            tuple(
                DraftRow(
                    row.token_ids or ((ord("b"),) * row.num_on_device if span.request.logits_processor else ()),
                    probs[place, : row.num_on_device] if row.has_probs else None,
                    num_on_device=row.num_on_device,
                    device_row=place,
                )
                for place, (span, row) in enumerate(zip(batch.spans, found, strict=True))
            ),
            on_device=drafts,
        )
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        recorder.uploads = recorder.downloads = 0
        verdict = verify(batch, draft)
        assert recorder.reads == {"event": 1}
        assert recorder.downloads == 1
        drafted = [row.num_on_device for row in draft.rows]
        assert [len(row.confidences) for row in verdict.rows] == drafted


@pytest.mark.parametrize("mode", ["greedy", "temperature", "top_p"])
def test_the_launches_of_a_chain_do_not_depend_on_the_batch(mode: str) -> None:
    counts = []
    for num in (1, 16):
        with fake_cuda() as recorder:
            batch = batch_of([SamplingParams(**MODES[mode])] * num, K)
            proposer, _ = fake_proposer("llama-1b", LLAMA_8B)
            probs = torch.empty(num, K, LLAMA_8B["vocab_size"], device=CUDA)
            memory = on_device(num)
            recorder.launches.clear()
            proposer.propose(request_rows("llama-1b", batch), [], probs, None, memory)
            counts.append(recorder.num_launches)
    assert counts[1] <= counts[0] + 2, counts


def test_the_loop_reads_once_per_position() -> None:
    """The counter sees what it is meant to see."""
    with fake_cuda() as recorder:
        batch = batch_of([SamplingParams(temperature=1.0)] * 3, K)
        proposer, _ = fake_proposer("llama-1b", LLAMA_8B)
        probs = torch.empty(3, K, LLAMA_8B["vocab_size"], device=CUDA)
        recorder.reads.clear()
        proposer.propose(request_rows("llama-1b", batch), [], probs)
        assert recorder.num_reads == K


def test_a_row_ends_where_its_confidence_says() -> None:
    """Early exit is decided on the host, from the one read; the row after it keeps all of its positions."""
    confidences = torch.tensor([[0.9, 0.5, 0.9, 0.9, 0.9], [0.9] * 5])

    def read(tensors: Any) -> list[npt.NDArray[Any]]:
        to_host(tensors)
        return [torch.ones(2, K, dtype=torch.int32).numpy(), values]

    values = confidences.numpy()
    with fake_cuda():
        proposer, _ = fake_proposer("llama-1b", LLAMA_8B)
        probs = torch.empty(2, K, LLAMA_8B["vocab_size"], device=CUDA)
        greedy = RowSampling(0.0, 1.0, 1, 0, False)
        rows = [DraftRequestRow(key, 0, (1, 2, 3), K, greedy, None, 0.5) for key in range(2)]
        found = proposer.propose(rows, [], probs, None, on_device(2, read))
        assert found == (DraftResponseRow(num_on_device=2), DraftResponseRow(num_on_device=K))
