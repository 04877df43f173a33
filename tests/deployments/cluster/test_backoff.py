"""The pauses between restarts."""

from __future__ import annotations

from deployments.cluster.backoff import STEADY_S, Backoff


def test_pauses_double_from_the_second_failure_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1.0, longest_s=10.0)
    assert [backoff.next_pause_s() for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.num_failures == 7


def test_only_a_steady_process_starts_a_new_series() -> None:
    backoff = Backoff(first_s=1.0, longest_s=10.0)
    backoff.next_pause_s()
    backoff.lived(STEADY_S - 0.001)
    assert backoff.next_pause_s() == 1.0
    backoff.lived(STEADY_S)
    assert backoff.num_failures == 0
    assert backoff.next_pause_s() == 0.0
