"""A draft that is adapted, in a whole engine: what it sends to its trainer, and swaps between its steps.

Promises: swaps in the middle of requests never change the output, greedy or seeded; a candidate is swapped in by
itself; a start takes the newest version that is not damaged; only drafts that can learn are accepted.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import scripted_trainer
from distill_fakes import VOCAB, open_target, write_target
from fakes import RandomPacer
from local_engine import LocalEngine
from tiny_eagle import make_eagle, make_parallel, write_eagle

from distill.models.export import export_draft
from engine.adaptation.versions import Versions, versions_folder
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import SamplingParams, SpeculativeOptions, Submit
from engine.metrics.counters import MetricSnapshot
from engine.workers.draft_worker import DraftWorker

ADAPTED = {"adaptation": {"enabled": True}, "k": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle(target, tmp_path_factory.mktemp("draft") / "eagle")


@pytest.fixture
def versions(target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Two other drafts as adapted versions."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    made = Versions(versions_folder(tmp_path, target, draft))
    for seed in (1, 2):
        weights = make_eagle(open_target(target), seed=seed)
        made.add(lambda folder, weights=weights: export_draft(weights, target, folder, card=""), {})  # type: ignore[misc]
    return made


def requests(count: int, *, seed: int = 0, max_tokens: int = 40, prefix: str = "r", **options: Any) -> list[Submit]:
    """Half greedy, half seeded, with a common beginning."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = tuple([9] * 20 + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 8))])
        sampling = SamplingParams(temperature=number % 2, seed=number, max_tokens=max_tokens)
        made.append(Submit(request_id=f"{prefix}{number}", prompt=prompt, sampling=sampling, **options))
    return made


def adaptation_of(engine: LocalEngine) -> Any:
    """The adaptation, which the draft's thread makes once it runs."""
    assert engine.draft is not None
    deadline_s = time.monotonic() + 60.0
    while engine.draft._adaptation is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return engine.draft._adaptation


def number(engine: LocalEngine, name: str) -> float:
    assert engine.draft is not None
    found: MetricSnapshot = engine.draft.metrics()
    return found.number(f"paceline_draft_adaptation_{name}")


def expected(target: Path, asked: list[Submit]) -> dict[str, list[int]]:
    with LocalEngine(target) as plain:
        return plain.generate(asked)


def test_swaps_in_the_middle_of_requests_never_change_the_output(target: Path, draft: Path, versions: Versions) -> None:
    """At a random K per request and step, with another draft every few steps."""
    asked = requests(12, max_tokens=60)
    found: dict[str, list[int]] = {submit.request_id: [] for submit in asked}
    pending = set(found)
    folders = [*versions.all(), draft]
    num_brought = 0
    trainer = scripted_trainer.command(10**9)
    pacer = RandomPacer(0, 4)
    with LocalEngine(target, draft_folder=draft, pacer=pacer, speculative=ADAPTED, trainer=trainer) as engine:
        adaptation = adaptation_of(engine)
        engine.submit(asked)
        while pending:
            for delta in engine.deltas():
                found[delta.request_id] += delta.token_ids
                pending -= {delta.request_id} if delta.finish_reason is not None else set()
            if not adaptation._ready:
                adaptation._bring(folders[num_brought % 3], is_rollback=False)
                num_brought += 1
        num_swaps = number(engine, "swaps_total")
        drafted = sum(stats.num_drafted for stats in engine.stats)
    assert num_swaps >= 3
    assert drafted > 0
    assert found == expected(target, asked)


def test_a_candidate_is_swapped_in_by_itself(target: Path, draft: Path, versions: Versions) -> None:
    """After two requests that consent; those that opt out are never sent to the trainer."""
    trainer = scripted_trainer.command(2, versions.all()[-1])
    with LocalEngine(target, draft_folder=draft, speculative=ADAPTED, trainer=trainer) as engine:
        opted_out = requests(4, prefix="o", speculative=SpeculativeOptions(learn=False))
        engine.generate(opted_out)
        asked = requests(4)
        found = engine.generate(asked)
        # The draft hears of the end of a request with the next one, and of the last ones never.
        engine.generate(requests(1, prefix="x", speculative=SpeculativeOptions(learn=False)))
        deadline = time.monotonic() + 120
        while number(engine, "swaps_total") < 1 or number(engine, "documents_total") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert number(engine, "documents_total") == 4
        again = engine.generate(requests(4, prefix="a"))
    assert found == expected(target, asked)
    assert list(again.values()) == list(found.values())


def worker(target: Path, draft: Path, **speculative: Any) -> DraftWorker:
    values = {
        "model": str(target),
        "device": "cpu",
        "dtype": "float32",
        "speculative": {"draft": str(draft), "adaptation": {"enabled": True}} | speculative,
    }
    return DraftWorker(EngineConfig.parse(values), draft, target, node_id="n")


def serving(made: DraftWorker) -> Path:
    made.load()
    assert made._adapted is not None
    return made._adapted._serving


def test_a_start_takes_the_newest_version(target: Path, draft: Path, versions: Versions) -> None:
    assert serving(worker(target, draft)) == versions.all()[-1]


def test_a_damaged_version_is_refused_and_the_shipped_draft_serves(
    target: Path, draft: Path, versions: Versions
) -> None:
    older, newer = versions.all()
    (newer / "model.safetensors").write_bytes(b"damaged")
    assert serving(worker(target, draft)) == older
    (older / "config.json").write_text("{}")
    assert serving(worker(target, draft)) == draft


def test_without_adaptation_no_version_is_read(target: Path, draft: Path, versions: Versions) -> None:
    made = worker(target, draft, adaptation={})
    made.load()
    assert made._adapted is None


def test_drafts_that_cannot_learn_are_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    parallel = tmp_path / "parallel"
    export_draft(make_parallel(open_target(target), positions=3), target, parallel, card="")
    for folder, problem in ((parallel, "parallel, with positions_per_pass 3"), (target, "the draft is a draft_model")):
        with pytest.raises(ConfigError, match=rf"^speculative\.adaptation\.enabled: true given, but .*{problem}"):
            worker(target, folder).load()
