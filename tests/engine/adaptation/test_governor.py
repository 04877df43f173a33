"""The trainer's duty cycle.

Promises: it never runs during a step or just after one; its CPU time over any period stays within its share.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adaptation.governor import BURST_S, QUIET_S, Governor

TICK_S = 0.02


@pytest.mark.parametrize("idle_s", [0.0, QUIET_S / 2])
def test_it_pauses_while_the_target_computes(idle_s: float) -> None:
    governor = Governor(1.0)
    assert governor.may_run(0.0, idle_s=1.0, used_s=0.0)
    assert not governor.may_run(1.0, idle_s=idle_s, used_s=0.0)
    assert governor.may_run(2.0, idle_s=QUIET_S, used_s=0.0)


@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 1.0))
def test_the_share_holds_over_every_period(seed: int, share: float) -> None:
    """A trainer that takes a whole CPU whenever it may, with random idle times of the target."""
    rng = random.Random(seed)
    governor = Governor(share)
    used = [0.0]
    may_run = False
    for tick in range(400):
        used.append(used[-1] + (TICK_S if may_run else 0.0))
        may_run = governor.may_run(tick * TICK_S, idle_s=rng.choice([0.0, 1.0]), used_s=used[-1])
    for start in range(0, 400, 40):
        for end in range(start + 1, 401, 40):
            period_s = (end - start) * TICK_S
            assert used[end] - used[start] <= share * (period_s + BURST_S) + 2 * TICK_S


def test_an_idle_target_gives_the_whole_share() -> None:
    governor = Governor(0.5)
    used_s, may_run = 0.0, False
    for tick in range(1000):
        used_s += TICK_S if may_run else 0.0
        may_run = governor.may_run(tick * TICK_S, idle_s=9.0, used_s=used_s)
    assert used_s == pytest.approx(0.5 * 1000 * TICK_S, rel=0.1)
