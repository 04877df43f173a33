"""The trainer of a draft that is adapted while it serves.

Promises: its memory is bounded; a held-out request is never trained on; the choices it trains on are the target's; it
offers weights only where they are better on held-out requests, and goes back to given weights when it is told to.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distill_fakes import STOP, jobs, open_model, write_target
from tiny_eagle import write_eagle

from distill.data.generate import Generator
from distill.data.shards import Document as Generated
from distill.online import session
from distill.online.replay import Example, Replay, collate, is_held_out, read_document
from distill.online.target_head import TargetHead
from distill.online.trainer import CONFIG, STEPS_PER_COMPARISON, Comparison, OnlineTrainer
from engine.adaptation.messages import (
    Candidate,
    Document,
    FrameReader,
    Progress,
    Serving,
    Setup,
    decode_from_trainer,
    frame,
)
from engine.adaptation.versions import Versions, damage
from engine.checkpoint.draft_check import check_draft
from engine.errors import EngineError
from engine.model.load import load_draft

PROMPT_LEN = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle(target, tmp_path_factory.mktemp("draft") / "eagle")


@pytest.fixture(scope="module")
def responses(target: Path) -> list[Generated]:
    """Greedy responses of the target with its features and choices."""
    generator = Generator(open_model(target), num_slots=16, max_len=64, stop_token=STOP, seed=0, num_top=16)
    made = jobs(96, prompt_len=PROMPT_LEN, temperature=0.0)
    return [response for response in generator.run(iter(made)) if len(response.tokens) > PROMPT_LEN + 8]


def document_of(response: Generated) -> Document:
    features = torch.from_numpy(response.features.view(np.int16)).view(torch.bfloat16)[:-1].flatten(1)
    return Document(
        tokens=response.tokens.astype(np.int32).tobytes(),
        features=features.contiguous().view(torch.uint8).numpy().tobytes(),
        itemsize=2,
        first_generated=PROMPT_LEN,
    )


def setup_of(target: Path, draft: Path, versions: Path, *, buffer_bytes: int = 1 << 24) -> Setup:
    return Setup(
        draft_folder=str(draft),
        target_folder=str(target),
        versions_folder=str(versions),
        buffer_bytes=buffer_bytes,
        k=4,
    )


def trainer_of(setup: Setup) -> OnlineTrainer:
    """Float32 and a high rate: the tiny draft is not trained at all."""
    return OnlineTrainer(setup, config=replace(CONFIG, lr=5e-3, average=0.9), compute_dtype=torch.float32)


def example(tokens: list[int], *, first_generated: int = 2, width: int = 4) -> Example:
    n = len(tokens)
    return Example(
        torch.tensor(tokens),
        torch.zeros(n, 1, width, dtype=torch.bfloat16),
        torch.zeros(n, 1, dtype=torch.int64),
        torch.zeros(n, 1),
        first_generated,
    )


def test_the_choices_are_those_of_the_target(target: Path, responses: list[Generated]) -> None:
    """The distribution that the generator measured, at every generated position."""
    head = TargetHead(target, (0, 1))
    for response in responses[:8]:
        tokens, features = read_document(document_of(response), 2)
        ids, logprobs = head.choices(tokens, features, PROMPT_LEN - 1)
        part = slice(PROMPT_LEN - 1, len(tokens) - 1)
        assert (ids[part, 0] == tokens[PROMPT_LEN:]).float().mean() > 0.9  # bfloat16 features may turn near ties
        expected = torch.from_numpy(response.top_logprobs.astype(np.float32))[part, 0]
        assert torch.allclose(logprobs[part, 0], expected, atol=0.15)


def test_without_the_last_layer_the_committed_token_stands_for_the_choice(target: Path) -> None:
    head = TargetHead(target, (0,))
    ids, logprobs = head.choices(torch.tensor([5, 6, 7]), torch.zeros(3, 1, 32, dtype=torch.bfloat16), 0)
    assert ids[:2].tolist() == [[6], [7]]
    assert logprobs.tolist() == [[0.0], [0.0], [0.0]]


def test_the_buffer_keeps_the_newest_documents_within_its_bound() -> None:
    size = example([0, 1, 2, 3]).num_bytes
    replay = Replay(20 * size)
    made = [example([i, i, i, i]) for i in range(200)]
    for each in made:
        replay.add(each)
        assert replay.num_bytes <= 20 * size
    kept = [*replay.training, *replay.held_out]
    assert replay.num_bytes == len(kept) * size
    sides = [[each for each in made if is_held_out(each.tokens[:2]) is side] for side in (False, True)]
    assert list(replay.training) == sides[0][-len(replay.training) :]
    assert list(replay.held_out) == sides[1][-len(replay.held_out) :]
    assert (len(replay.training), len(replay.held_out)) == (16, 3)


def test_requests_with_one_prompt_are_on_one_side() -> None:
    """So that a held-out response was never trained on. One prompt in HELD_OUT is held out."""
    replay = Replay(1 << 20)
    for prompt in range(50):
        for response in range(4):
            replay.add(example([prompt, prompt, response, response]))
    trained = {tuple(each.tokens[:2].tolist()) for each in replay.training}
    held_out = {tuple(each.tokens[:2].tolist()) for each in replay.held_out}
    assert not trained & held_out
    assert len(trained) + len(held_out) == 50
    assert held_out


def test_only_generated_tokens_have_weight() -> None:
    batch = collate([example([1, 2, 3, 4, 5], first_generated=3), example([1, 2, 3], first_generated=1)])
    assert batch.weight.tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]


def test_a_candidate_must_be_better_by_more_than_chance() -> None:
    assert Comparison(served=2.0, trained=2.5, error=0.1, num_documents=9).is_better
    assert not Comparison(served=2.0, trained=2.5, error=0.3, num_documents=9).is_better
    assert not Comparison(served=2.0, trained=2.01, error=0.0, num_documents=9).is_better
    assert not Comparison(served=2.0, trained=1.5, error=0.1, num_documents=9).is_better


def test_training_raises_held_out_acceptance_and_writes_a_draft_that_loads(
    target: Path, draft: Path, responses: list[Generated], tmp_path: Path
) -> None:
    trainer = trainer_of(setup_of(target, draft, tmp_path))
    assert not trainer.has_work
    for response in responses:
        trainer.add(document_of(response))
    found: Candidate | None = None
    for _ in range(3 * STEPS_PER_COMPARISON):
        if not trainer.has_work:
            break
        found = trainer.step() or found
    assert found is not None, trainer.progress()
    assert found.trained > 1.05 * found.served
    folder = Path(found.folder)
    assert damage(folder) is None
    check_draft(folder, target)
    load_draft(folder, target, dtype=torch.float32)
    assert Versions(tmp_path).newest() is not None
    progress = trainer.progress()
    assert progress.num_documents == len(responses)
    assert progress.num_steps > 0
    # Against the candidate itself, the same weights are no gain; against the first ones they are.
    trainer.serve(folder)
    assert trainer.compare().trained < 1.05 * trainer.compare().served
    trainer.load(draft)
    assert trainer.compare().trained == pytest.approx(trainer.compare().served)


def test_a_document_is_read_a_bounded_number_of_times(
    target: Path, draft: Path, responses: list[Generated], tmp_path: Path
) -> None:
    trainer = trainer_of(setup_of(target, draft, tmp_path))
    for response in responses[:60]:
        trainer.add(document_of(response))
    trainer._credit = 1.0
    trainer.step()
    assert not trainer.has_work
    trainer.add(document_of(responses[60]))
    trainer._credit = 1.0
    assert trainer.has_work


def test_the_loop_reads_documents_and_reports(
    target: Path, draft: Path, responses: list[Generated], tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    thread = threading.Thread(target=session.serve, args=(theirs,))
    thread.start()
    ours.sendall(frame(setup_of(target, draft, tmp_path)))
    for response in responses:
        ours.sendall(frame(document_of(response)))
    ours.sendall(frame(Serving(folder=str(draft), is_rollback=True)))
    reader = FrameReader(ours)
    reports: list[Progress] = []
    while not reports or reports[-1].num_steps < session.REPORT_STEPS:
        for body in reader.read():
            message = decode_from_trainer(body)
            if isinstance(message, Progress):
                reports.append(message)
    assert reports[-1].num_documents == len(responses)
    assert 0 < reports[-1].buffer_bytes <= 1 << 24
    ours.close()
    thread.join(60)
    assert not thread.is_alive()
    theirs.close()


def test_a_message_that_is_none_is_refused() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x02\x00\x00\x00??")
    with pytest.raises(EngineError, match="message to the trainer"):
        session.serve(theirs)
    ours.close()
    theirs.close()
