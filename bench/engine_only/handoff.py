"""How long the baton takes between target and draft: order written until the draft is awake, and back.

Owns the measurement on the real buffer, with a draft that answers at once. The target is busy between two orders, as it
is in a step.
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
"""The target's own work between two orders."""
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """Seconds of each order, in both directions."""

    there_s: tuple[float, ...]
    back_s: tuple[float, ...]

    def p50_us(self) -> tuple[float, float]:
        """Medians in microseconds, there and back."""
        return 1e6 * statistics.median(self.there_s), 1e6 * statistics.median(self.back_s)


def measure_handoff(*, num_orders: int = 2000, num_rows: int = 1) -> Handoff:
    """Orders of `num_rows` requests, answered by another process."""
    end = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=1)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(end.handle(),), daemon=True)
    process.start()
    there_s, back_s = [], []
    try:
        end.wait_open(60.0)
        for number in range(num_orders):
            rows = [_row(key, number) for key in range(1, num_rows + 1)]
            busy_until = time.perf_counter() + BUSY_S
            while time.perf_counter() < busy_until:
                pass
            begin = time.perf_counter()
            answer = end.ask(rows, deadline_s=DEADLINE_S)
            awake = answer.draft_s  # a point in time here: one clock serves all processes of a machine
            there_s.append(awake - begin)
            back_s.append(time.perf_counter() - awake)
    finally:
        end.close()
        process.join(10.0)
        process.kill()
    return Handoff(tuple(there_s), tuple(back_s))


def _row(key: int, number: int) -> DraftRequestRow:
    return DraftRequestRow(key, number, (key,), 5, RowSampling(0.0, 1.0, key, number, True))


def _answer(handle: BufferHandle) -> None:
    """A draft that computes nothing; instead of a duration it tells when it woke up."""
    end = open_draft_buffer(handle, node_id=NODE, gpu_uuid=None)
    with contextlib.suppress(EngineUnavailable):
        while True:
            order = end.wait(1.0)
            awake = time.perf_counter()
            if order is not None:
                rows = [DraftResponseRow((1,) * row.k, (0.5,) * row.k) for row in order.rows]
                end.respond(rows, draft_s=awake)
    end.close()
