"""What the verifier asks of its clock. The rules of acceptance are in the other files of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, ForwardInput, ForwardResult, Span
from engine.core.verifier import Verifier
from engine.messages import SamplingParams, Submit
from engine.sampling.readback import StepTimes
from engine.sampling.staging import to_host


class Clock:
    """Gives fixed times, and notes in `events` what it is asked."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def begin(self) -> None:
        self._events.append("begin")

    def forwarded(self) -> None:
        self._events.append("forwarded")

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        self._events.append("read")
        return to_host(tensors)

    def times(self) -> StepTimes:
        self._events.append("times")
        return StepTimes(0.25, 0.5)


def test_the_forward_is_timed_apart_from_what_follows_it_and_results_are_read_once() -> None:
    events: list[str] = []

    def forward(forward_input: ForwardInput) -> ForwardResult:
        events.append("forward")
        return ForwardResult(torch.eye(4)[[2]])

    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=0.0))
    request = Request(submit=submit, key=1, stream_key=0, tokens=[1], block_ids=[1])
    batch = Batch(1, (Span(request, 0, 1, 0, True, "plan"),), 0)
    verdict = Verifier(forward, block_size=4, clock=Clock(events)).verify(batch, Draft((DraftRow(),)))
    assert events == ["begin", "forward", "forwarded", "read", "times"]
    assert (verdict.verify_s, verdict.sample_s, verdict.features) == (0.25, 0.5, None)
    assert verdict.rows[0].token_ids == (2,)
