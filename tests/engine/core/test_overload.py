"""Overload: goodput holds, clients share it fairly, and an aborted request is gone within a step.

Time is counted in engine steps, so the results do not depend on the machine's load.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from fakes import FixedPacer, ToyEngine, ToyModel

from deployments.http.admission import Admission, Client, Ticket
from engine.core.drafter import NoDrafter
from engine.errors import QueueFull
from engine.messages import Priority, SamplingParams, Submit

RUNNING, WAITING, TOKENS = 8, 8, 10
CAPACITY = RUNNING / (TOKENS + 1)
"""Requests per step: one step prefills, then each gives a token."""
DEADLINE = 60


@dataclass
class Load:
    """Clients in front of one engine.

    Args:
        rates: requests per step that each client offers.
        priorities: of the clients, `normal` where not named.
    """

    rates: dict[str, float]
    priorities: dict[str, Priority] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        target = ToyModel(vocab_size=7, num_blocks=200)
        self.engine = ToyEngine(
            target, NoDrafter(), FixedPacer(0), num_blocks=200, max_num_requests=RUNNING, max_step_tokens=64
        )
        self.now = 0
        self.admission = Admission(RUNNING + WAITING, clock=lambda: self.now / 10)
        self.rng = random.Random(self.seed)
        self.open: dict[str, tuple[str, int, Ticket]] = {}
        self.good: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.waits: dict[str, list[int]] = {client: [] for client in self.rates}
        self.num_sent = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1
            for client, rate in self.rates.items():
                for _ in range(int(rate) + (self.rng.random() < rate % 1)):
                    self.send(client)
            self.engine.step()
            self.collect()

    def send(self, client: str) -> None:
        self.num_sent += 1
        try:
            ticket = self.admission.enter(Client(name=client), 1)
        except QueueFull:
            self.refused[client] += 1
            return
        name = f"{client}-{self.num_sent}"
        self.open[name] = (client, self.now, ticket)
        self.engine.engine.submit(
            Submit(
                request_id=name,
                prompt=(1, 2, 3),
                sampling=SamplingParams(temperature=0.0, max_tokens=TOKENS),
                client=client,
                priority=self.priorities.get(client, "normal"),
            )
        )

    def collect(self) -> None:
        for name, deltas in self.engine.deltas.items():
            if name in self.open and deltas[-1].finish_reason is not None:
                client, begin, ticket = self.open.pop(name)
                ticket.release()
                self.waits[client].append(self.now - begin)
                (self.good if self.now - begin <= DEADLINE else self.late)[client] += 1
        self.engine.deltas.clear()
        for name, (client, begin, ticket) in list(self.open.items()):
            if self.now - begin > DEADLINE:
                self.engine.engine.abort(name)
                ticket.release()
                del self.open[name]
                self.late[client] += 1


def goodput(factor: float) -> float:
    load = Load({"a": factor * CAPACITY})
    load.run(1500)
    assert load.num_sent == sum((load.good + load.refused + load.late).values()) + len(load.open), "all accounted for"
    return sum(load.good.values()) / 1500


def test_goodput_at_four_times_the_capacity() -> None:
    """Refusing requests keeps the admitted ones fast enough to meet their deadline."""
    assert goodput(4.0) >= 0.95 * max(goodput(1.0), 0.9 * CAPACITY)


def test_a_flood_of_one_client_leaves_the_others_their_share() -> None:
    load = Load({"flood": 6 * CAPACITY, "modest": 0.3 * CAPACITY})
    load.run(1500)
    asked = load.good["modest"] + load.refused["modest"] + load.late["modest"]
    assert load.good["modest"] >= 0.9 * (asked - len(load.open)), (load.good, load.refused, load.late)
    assert sum(load.good.values()) / 1500 >= 0.9 * CAPACITY, "at no cost in total goodput"


def test_priorities_share_by_weight_and_low_ones_still_run() -> None:
    load = Load({"h": 2 * CAPACITY, "n": 2 * CAPACITY, "l": 2 * CAPACITY}, priorities={"h": "high", "l": "low"}, seed=1)
    load.run(2000)
    median = {client: sorted(waits)[len(waits) // 2] for client, waits in load.waits.items()}
    assert median["h"] <= median["n"] <= median["l"], median
    assert load.good["l"] + load.late["l"] > 50, "low priority makes progress"


def test_what_is_cancelled_is_gone_within_a_step() -> None:
    load = Load({"a": 2.0})
    load.run(20)
    names = list(load.open)
    for name in names:
        load.engine.engine.abort(name)
    load.engine.step()
    assert load.engine.pool.num_free == load.engine.pool.num_blocks - 1
    assert not load.engine.engine.has_work
