"""When the hysteresis switch turns, probes and takes baseline samples: its default schedule, in exact seconds."""

from __future__ import annotations

from typing import Any

from switches import settled

from autoscale.policy.switch import HysteresisSwitch, SwitchParams

TICK = 0.125


def times_of(mode: str, switch: HysteresisSwitch, gain: float, begin: float, end: float, **options: Any) -> list[float]:
    """Times at which a step every TICK seconds gets this mode; steps of a probe draft."""
    times = []
    for tick in range(int(begin / TICK), int(end / TICK)):
        got = switch.decide(gain, tick * TICK, **options)
        if got in ("probe", "wide_probe"):
            switch.drafted(tick * TICK)
        if got == mode:
            times.append(tick * TICK)
    return times


def on_switch() -> HysteresisSwitch:
    """On since 0 s."""
    return settled(HysteresisSwitch(SwitchParams()))


def off_switch() -> HysteresisSwitch:
    """Off since 0.25 s."""
    switch = on_switch()
    assert [switch.decide(0.9, now) for now in (0.0, 0.125, 0.25)] == ["on", "on", "off"]
    return switch


def test_it_turns_off_after_a_quarter_of_a_second_without_gain() -> None:
    switch = off_switch()
    assert not switch.is_on
    assert switch.num_switches == 2


def test_a_gain_in_between_starts_the_wait_anew() -> None:
    switch = on_switch()
    modes = [switch.decide(gain, tick * TICK) for tick, gain in enumerate((0.9, 0.9, 1.01, 0.9, 0.9, 0.9))]
    assert modes == ["on"] * 5 + ["off"]


def test_the_two_thresholds_belong_to_their_sides() -> None:
    assert times_of("off", on_switch(), 1.0, 0, 0.5) == [0.25, 0.375], "no gain is none"
    assert times_of("on", on_switch(), 1.001, 0, 0.5) == [0, 0.125, 0.25, 0.375]
    assert times_of("on", off_switch(), 1.029, 0.375, 1.0) == []
    assert times_of("on", off_switch(), 1.03, 0.375, 0.75) == [0.625]


def test_baseline_samples_of_three_steps_get_rarer_while_the_gain_is_clear() -> None:
    begins = (1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0)
    expected = [begin + step * TICK for begin in begins for step in range(3)]
    assert times_of("baseline", on_switch(), 1.25, 0, 95) == expected


def test_baseline_samples_stay_frequent_while_the_gain_is_in_doubt() -> None:
    begins = (1.0, 3.0, 7.0, 11.0, 15.0)
    expected = [begin + step * TICK for begin in begins for step in range(3)]
    assert times_of("baseline", on_switch(), 1.2, 0, 18) == expected


def test_probes_of_six_steps_get_rarer() -> None:
    """A probe lasts 5 ticks after its first step; the pause before the next one is doubled, up to 30 s."""
    switch = off_switch()
    begins, begin, pause = [], 1.25, 1.0
    while begin < 150:
        begins.append(begin)
        pause = min(2 * pause, 30.0)
        begin += 5 * TICK + pause
    expected = [begin + step * TICK for begin in begins for step in range(6)]
    assert times_of("probe", switch, 0.9, 0.375, 150) == expected
    assert switch.num_probes == 1 + len(begins) == 9


def test_where_no_draft_could_pay_a_probe_waits_half_a_minute_longer() -> None:
    times = times_of("wide_probe", off_switch(), 0.9, 0.375, 32, worth_probing=False)
    assert times == [31.25 + step * TICK for step in range(6)]


def test_baseline_samples_are_taken_while_off_only_beside_lookup_drafts() -> None:
    assert times_of("baseline", off_switch(), 0.9, 0.375, 10) == []
    begins = times_of("baseline", off_switch(), 0.9, 0.375, 5, worth_probing=False, has_lookup_drafts=True)[::3]
    assert begins == [1.25, 3.25]


def test_coming_back_makes_the_next_probe_soon_again() -> None:
    switch = off_switch()
    times_of("probe", switch, 0.9, 0.375, 20)
    times_of("on", switch, 1.5, 20, 21)
    assert switch.is_on
    assert switch.num_switches == 3
    assert times_of("probe", switch, 0.9, 21, 23)[0] == 22.25, "off at 21.25, and one second"
    assert switch.num_switches == 4


def test_it_starts_with_a_probe_that_decides_at_once() -> None:
    """A gain that would not switch drafting on again is enough."""
    for gain, after in ((1.001, "on"), (1.0, "off")):
        switch = HysteresisSwitch(SwitchParams())
        assert times_of("probe", switch, gain, 0, 0.75) == [step * TICK for step in range(6)]
        assert switch.decide(gain, 0.75) == after
        assert (switch.num_probes, switch.num_switches) == (1, int(after == "on"))


def test_the_next_probe_after_the_first_comes_a_second_later() -> None:
    switch = HysteresisSwitch(SwitchParams())
    assert times_of("probe", switch, 0.9, 0, 3)[6] == 0.625 + 1.0


def test_where_no_draft_could_pay_at_the_start_the_first_probe_is_wide_and_late() -> None:
    times = times_of("wide_probe", HysteresisSwitch(SwitchParams()), 0.9, 0, 32, worth_probing=False)
    assert times == [30.0 + step * TICK for step in range(6)]


def test_a_probe_waits_until_it_costs_a_hundredth_of_the_time_since_the_last_one() -> None:
    """The first one after switching off comes at 0.25 + 5 s; it ends five ticks later, and the next waits 5 s again."""
    times = times_of("probe", off_switch(), 0.9, 0.375, 12, probe_cost_s=0.05)
    assert times[::6] == [5.25, 5.25 + 5 * TICK + 5]


def test_a_probe_stays_what_it_was_when_it_began() -> None:
    """Its own steps change the costs by which the next one is chosen."""
    switch = off_switch()
    assert switch.decide(0.9, 1.25) == "probe"
    switch.drafted(1.25)
    assert switch.decide(0.9, 1.375, worth_probing=False, probe_cost_s=9.0) == "probe"


def test_a_probe_whose_requests_cannot_draft_ends() -> None:
    """At the start the acceptance that is assumed decides then, so that the requests that can draft do."""
    switch = HysteresisSwitch(SwitchParams())
    assert [switch.decide(1.2, 0.0) for _ in range(25)] == ["probe"] * 24 + ["on"]
    switch = off_switch()
    assert [switch.decide(0.9, 1.25) for _ in range(25)] == ["probe"] * 24 + ["off"]
    assert switch.decide(0.9, 1.25 + 2.0 - 0.001) == "off"
    assert switch.decide(0.9, 1.25 + 2.0) == "probe"
