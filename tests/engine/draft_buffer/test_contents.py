"""What a draft buffer carries between two processes: exact values, at constant memory and file descriptors."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import pytest
import torch
from buffer_children import (
    NODE,
    SPEC,
    child,
    drafts,
    echo,
    num_fds,
    random_bits,
    resident_bytes,
    traces_left,
    writes_random_probs,
)
from draft_requests import ROWS, open_here

from engine.draft.messages import DraftRequest, DraftRequestRow, DraftResponseRow
from engine.draft_buffer.target_endpoint import TargetEndpoint, create_draft_buffer
from engine.messages import GrammarSpec
from engine.sampling.penalties import TokenOptions


def test_ten_thousand_steps_leave_both_processes_as_they_were(target: TargetEndpoint) -> None:
    before = traces_left()
    with child(drafts, target.handle()) as draft:
        target.wait_open(20)
        assert set(traces_left()) <= set(before)

        def run(num_steps: int) -> list[float]:
            times = []
            for step in range(num_steps):
                start = time.perf_counter()
                response = target.ask(ROWS, (step,), deadline_s=5)
                times.append(time.perf_counter() - start)
                assert response.rows[1].token_ids == (1, 2, 3, 4, 5)
            return sorted(times)

        run(1000)
        sides = (os.getpid(), draft.pid)
        fds, resident = [num_fds(pid) for pid in sides], [resident_bytes(pid) for pid in sides]
        times = run(9000)
        assert [num_fds(pid) for pid in sides] == fds
        growth = [resident_bytes(pid) - was for pid, was in zip(sides, resident, strict=True)]
        assert max(growth) < 1 << 20, growth
        print(f"round trip: p50 {times[4500] * 1e6:.1f} us, p99 {times[8910] * 1e6:.1f} us")
        assert times[4500] < 5e-3
        target.close()
        draft.join(5)
        assert draft.exitcode == 0


@pytest.mark.parametrize("itemsize", [2, 4])
def test_features_are_read_where_they_were_written(itemsize: int) -> None:
    """They are read in place, at the rows that a request names. Other rows are refused."""
    spec = dataclasses.replace(SPEC, feature_rows=9, feature_width=5, feature_itemsize=itemsize)
    endpoint = create_draft_buffer(spec, device="cpu", node_id=NODE, epoch=1)
    draft = open_here(endpoint)
    endpoint.wait_open(5)
    assert endpoint.features is not None
    assert draft.features is not None
    endpoint.features.copy_(torch.randn(9, 5))
    endpoint.probs.fill_(7.0)
    assert torch.equal(draft.features, endpoint.features)
    assert draft.features.dtype == (torch.bfloat16 if itemsize == 2 else torch.float32)
    named = [
        dataclasses.replace(row, feature_rows=damage) for row, damage in zip(ROWS, ((-1, 0, 8), (3, 2, 3)), strict=True)
    ]
    seen: list[DraftRequest] = []

    def respond() -> None:
        request = draft.wait(5)
        assert request is not None
        seen.append(request)
        draft.respond([DraftResponseRow(), DraftResponseRow()], draft_s=0.0)

    thread = threading.Thread(target=respond)
    thread.start()
    endpoint.ask(named, deadline_s=5)
    thread.join()
    assert seen[0].rows == tuple(named)
    for wrong in ((-2, 0, 1), (0, 1, 9), ()):
        with pytest.raises(ValueError, match="feature rows"):
            endpoint.ask([dataclasses.replace(ROWS[0], feature_rows=wrong)], deadline_s=5)
    endpoint.close()
    draft.close()


def test_probabilities_arrive_bit_for_bit(target: TargetEndpoint) -> None:
    with child(writes_random_probs, target.handle()):
        target.wait_open(20)
        for seq in range(1, 6):
            response = target.ask(ROWS, deadline_s=5)
            assert response.rows[0].has_probs
            assert torch.equal(target.probs.view(torch.int32), random_bits(seq))


def test_a_request_above_the_capacity_raises_and_changes_nothing(target: TargetEndpoint) -> None:
    row = ROWS[0]
    large = TokenOptions(num_prompt=1, grammar=GrammarSpec(kind="regex", text="a" * 2048))
    too_much: list[tuple[list[DraftRequestRow], list[int], str]] = [
        ([row] * 5, [], "rows: 5 given, allowed are 4"),
        ([dataclasses.replace(row, new_tokens=(1,) * 65)], [], "new tokens: 65 given, allowed are 64"),
        ([dataclasses.replace(row, options=large)], [], r"options bytes: \d+ given, allowed are 2048"),
        ([row], [1] * 9, "released keys: 9 given, allowed are 8"),
        ([dataclasses.replace(row, k=6)], [], "k: 6 given, allowed are 5"),
        ([dataclasses.replace(row, new_tokens=(1000,))], [], "outside 0..999"),
    ]
    with child(drafts, target.handle()):
        target.wait_open(20)
        for rows, released, message in too_much:
            with pytest.raises(ValueError, match=message):
                target.ask(rows, released, deadline_s=5)
        assert target.ask(ROWS, deadline_s=5).seq == 1


def test_a_response_must_fit_its_request(target: TargetEndpoint) -> None:
    draft = open_here(target)
    asking = threading.Thread(target=lambda: target.ask(ROWS, deadline_s=5))
    asking.start()
    request = draft.wait(5)
    assert request is not None
    good = echo(request)
    for rows in ([good[0]], [good[0], DraftResponseRow((1,) * 6)], [good[0], DraftResponseRow((1000,))]):
        with pytest.raises(ValueError, match=r"draft response: |tokens for request 1: 6 given, allowed are 5"):
            draft.respond(rows, draft_s=0.0)
    draft.respond(good, draft_s=0.0)
    asking.join()
    with pytest.raises(ValueError, match="no draft request to respond to"):
        draft.respond(good, draft_s=0.0)
    draft.close()


def test_handoff_is_the_round_trip_without_the_drafts_own_time(target: TargetEndpoint) -> None:
    draft = open_here(target)

    def compute() -> None:
        request = draft.wait(5)
        assert request is not None
        time.sleep(0.05)
        draft.respond(echo(request), draft_s=0.05)

    thread = threading.Thread(target=compute)
    thread.start()
    start = time.monotonic()
    response = target.ask(ROWS, deadline_s=5)
    assert response.draft_s == 0.05
    assert 0 < response.handoff_s <= time.monotonic() - start - 0.05
    thread.join()
    draft.close()
