"""Latency between target and draft: from writing a draft request until the draft is awake, and back.

Owns the measurement on the real draft buffer, with a draft that responds at once. The target is busy between two draft
requests, as it is in a step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from dataclasses import dataclass

from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import BufferHandle, create_draft_buffer, open_draft_buffer
from engine.errors import EngineUnavailable
from engine.sampling.row_sampling import RowSampling

NODE = "bench"
SPEC = BufferSpec(max_rows=32, max_k=5, max_request_tokens=256, max_released=8, draft_vocab=1024, target_vocab=49152)
BUSY_S = 0.002
"""Seconds that the target computes between two draft requests."""
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """Latency of each draft request and of its response."""

    there_s: tuple[float, ...]
    """Seconds from writing each draft request until the draft is awake."""
    back_s: tuple[float, ...]
    """Seconds from then until the target has read the response."""

    def p50_us(self) -> tuple[float, float]:
        """Medians in microseconds: of the draft requests, and of the responses."""
        return 1e6 * statistics.median(self.there_s), 1e6 * statistics.median(self.back_s)


def measure_handoff(*, num_draft_requests: int = 2000, num_rows: int = 1) -> Handoff:
    """Measure with a draft in another process.

    Args:
        num_draft_requests: draft requests to send.
        num_rows: rows of each.
    """
    endpoint = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=1)
    process = multiprocessing.get_context("spawn").Process(target=_respond, args=(endpoint.handle(),), daemon=True)
    process.start()
    there_s, back_s = [], []
    try:
        endpoint.wait_open(60.0)
        for number in range(num_draft_requests):
            rows = [_row(key, number) for key in range(1, num_rows + 1)]
            busy_until = time.perf_counter() + BUSY_S
            while time.perf_counter() < busy_until:
                pass
            begin = time.perf_counter()
            response = endpoint.ask(rows, deadline_s=DEADLINE_S)
            awake = response.draft_s  # here a point in time: all processes of a machine share the clock
            there_s.append(awake - begin)
            back_s.append(time.perf_counter() - awake)
    finally:
        endpoint.close()
        process.join(10.0)
        process.kill()
    return Handoff(tuple(there_s), tuple(back_s))


def _row(key: int, number: int) -> DraftRequestRow:
    return DraftRequestRow(key, number, (key,), 5, RowSampling(0.0, 1.0, key, number, True))


def _respond(handle: BufferHandle) -> None:
    """A draft that computes nothing. It sends the time of its wake-up in place of the duration."""
    endpoint = open_draft_buffer(handle, node_id=NODE, gpu_uuid=None)
    with contextlib.suppress(EngineUnavailable):
        while True:
            request = endpoint.wait(1.0)
            awake = time.perf_counter()
            if request is not None:
                rows = [DraftResponseRow((1,) * row.k, (0.5,) * row.k) for row in request.rows]
                endpoint.respond(rows, draft_s=awake)
    endpoint.close()
