"""Verification on a GPU: the host waits for the device once per step, in every mode, however large the batch.

Checked with fake CUDA tensors: the code, shapes and devices are those of a GPU, values do not exist.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, Recorder, fake_cuda
from fake_steps import UNMASKED_MODES

from engine.core.acceptance import AcceptanceKind
from engine.core.request import Request
from engine.core.step import Draft, DraftRow, Span
from engine.core.verifier import accept_or_reject
from engine.messages import SamplingParams, Submit
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions

VOCAB = 128_256


def verify(
    modes: list[dict[str, Any]], *, k: int, from_q: bool, acceptance: AcceptanceKind = "auto", vocab: int | None = None
) -> Recorder:
    """Verify one span per mode with k draft tokens each."""
    with fake_cuda() as recorder:
        spans, rows, num_rows = [], [], 0
        for key, options in enumerate(modes):
            sampling = SamplingParams(**options)
            request = Request(
                submit=Submit(request_id=str(key), prompt=(1, 2, 3), sampling=sampling),
                key=key,
                stream_key=5,
                tokens=[1, 2, 3],
                num_computed=0,
            )
            token_options = TokenOptions.of(sampling, 3)
            request.logits_processor = LogitsProcessor(token_options) if token_options is not None else None
            spans.append(Span(request, 0, 3, k, True, "plan"))
            probs = torch.empty(k, vocab or VOCAB, device=CUDA) if from_q else None
            rows.append(DraftRow((0,) * k, probs))
            num_rows += k + 1 + (2 if sampling.num_prompt_logprobs is not None else 0)
        columns = torch.arange(vocab, device=CUDA) if vocab is not None else None
        logits = torch.empty(num_rows, VOCAB, device=CUDA)
        recorder.launches.clear()
        verdicts = accept_or_reject(logits, spans, Draft(tuple(rows), columns), acceptance=acceptance)
        assert len(verdicts) == len(modes)
    return recorder


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("num_requests", [1, 64])
@pytest.mark.parametrize("mode", UNMASKED_MODES)
def test_the_host_waits_once_per_step(mode: str, num_requests: int, k: int) -> None:
    recorder = verify([UNMASKED_MODES[mode]] * num_requests, k=k, from_q=False)
    assert recorder.num_reads == 1, recorder.reads


@pytest.mark.parametrize("vocab", [None, 32_000])
def test_all_modes_mixed_in_one_step_wait_once(vocab: int | None) -> None:
    recorder = verify(list(UNMASKED_MODES.values()) * 7, k=4, from_q=True, vocab=vocab)
    assert recorder.num_reads == 1, recorder.reads


@pytest.mark.parametrize(("mode", "k", "most"), [("greedy", 4, 12), ("temperature", 0, 60), ("temperature", 4, 81)])
def test_the_number_of_launches_does_not_depend_on_the_batch(mode: str, k: int, most: int) -> None:
    one, many = (verify([UNMASKED_MODES[mode]] * num, k=k, from_q=True).num_launches for num in (1, 64))
    assert many <= one + 2
    assert many <= most


def test_the_twin_reads_once_per_span_and_more() -> None:
    """The counter sees what it is meant to see."""
    assert verify([UNMASKED_MODES["temperature"]] * 64, k=0, from_q=False, acceptance="each").num_reads > 64
