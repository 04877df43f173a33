"""The switch neither flaps nor stays off for good, and samples the baseline while it is on."""

from __future__ import annotations

import math

import numpy as np
from switches import settled

from autoscale.policy.switch import HysteresisSwitch, SwitchParams


def test_the_switch_waits_and_does_not_flap() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(dwell_s=0.5, first_baseline_s=math.inf)))
    rng = np.random.default_rng(0)
    for step in range(2000):  # a gain that hovers between both thresholds
        switch.decide(1.0 + 0.03 * rng.random(), step * 0.02, worth_probing=False)
    assert switch.num_switches == 1
    assert [switch.decide(0.9, 40 + t, worth_probing=False) for t in (0.0, 0.4, 0.6)] == ["on", "on", "off"]
    assert [switch.decide(1.5, 41 + t, worth_probing=False) for t in (0.0, 0.4, 0.6)] == ["off", "off", "on"]


def test_nothing_is_off_for_good_and_probes_get_rarer() -> None:
    switch = HysteresisSwitch(SwitchParams(first_probe_s=1.0, longest_probe_s=8.0, probe_steps=2))
    starts, now_s, probing = [], 0.0, False
    while now_s < 60.0:
        mode = switch.decide(0.8, now_s)
        if mode == "probe":
            if not probing:
                starts.append(now_s)
            switch.drafted(now_s)
        probing = mode == "probe"
        now_s += 0.05
    gaps = np.diff(starts)
    assert len(starts) >= 6
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps.max() <= 8.5


def test_a_probe_comes_late_where_costs_say_that_nothing_pays() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(doubtful_probe_s=5.0)))
    modes = [switch.decide(0.5, step * 0.1, worth_probing=False) for step in range(200)]
    assert "probe" not in modes
    assert modes.index("wide_probe") > 50


def test_the_baseline_is_sampled_while_drafting() -> None:
    switch = settled(HysteresisSwitch(SwitchParams()))
    modes = [switch.decide(2.0, step * 0.02) for step in range(5000)]
    samples = [step for step, mode in enumerate(modes) if mode == "baseline"]
    assert set(modes) == {"on", "baseline"}
    assert 6 <= len(samples) <= 40
    assert samples[0] < 60


def test_the_baseline_is_sampled_more_often_at_a_small_gain_and_also_with_lookup_drafts() -> None:
    def num_samples(gain: float, has_lookup_drafts: bool) -> int:
        switch = HysteresisSwitch(SwitchParams())
        count = 0
        for step in range(5000):
            mode = switch.decide(gain, step * 0.02, has_lookup_drafts=has_lookup_drafts)
            count += mode == "baseline"
            if mode == "probe":
                switch.drafted(step * 0.02)
        return count

    assert num_samples(1.1, has_lookup_drafts=True) > 1.5 * num_samples(2.0, has_lookup_drafts=True)
    assert num_samples(0.9, has_lookup_drafts=True) > 1.5 * num_samples(2.0, has_lookup_drafts=True)
    assert num_samples(0.9, has_lookup_drafts=False) == 0


def test_one_probe_drafts_exactly_its_steps_and_is_counted_once() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(dwell_s=0.0, first_probe_s=1.0, probe_steps=3)))
    assert switch.decide(0.5, 0.0) == "off"
    assert (switch.num_switches, switch.num_probes, switch.is_on) == (2, 1, False)
    assert switch.decide(0.5, 0.99) == "off"
    modes = []
    for step in range(5):
        modes.append(switch.decide(0.5, 1.0 + 0.01 * step))
        if modes[-1] == "probe":
            switch.drafted(1.0 + 0.01 * step)
    assert modes == ["probe"] * 3 + ["off"] * 2
    assert switch.num_probes == 2
    assert switch.decide(0.5, 1.02 + 2.0 - 1e-6) == "off", "the pause doubles"
    assert switch.decide(0.5, 1.02 + 2.0) == "probe"
    assert switch.num_probes == 3


def test_both_thresholds_are_inclusive() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(dwell_s=0.0, on_gain=1.03, off_gain=1.0)))
    assert switch.decide(1.0, 0.0) == "off"
    assert switch.decide(1.0299, 0.1) == "off"
    assert switch.decide(1.03, 0.2) == "on"
    assert switch.num_switches == 3


def test_a_gain_that_returns_before_the_dwell_ends_changes_nothing() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(dwell_s=0.5)))
    for now_s, gain in ((0.0, 0.9), (0.4, 1.1), (0.5, 0.9), (0.9, 0.9)):
        assert switch.decide(gain, now_s) == "on"
    assert switch.num_switches == 1


def test_one_baseline_sample_has_exactly_its_steps() -> None:
    switch = settled(HysteresisSwitch(SwitchParams(first_baseline_s=1.0, baseline_steps=3)))
    modes = [switch.decide(2.0, 1.0 + 0.01 * step) for step in range(5)]
    assert modes == ["baseline"] * 3 + ["on"] * 2
    assert switch.decide(2.0, 3.0 - 1e-6) == "on", "the pause doubles"
    assert switch.decide(2.0, 3.0) == "baseline"
