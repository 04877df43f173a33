"""The step loop against one-token-at-a-time generation, over random batches, drafters, K schedules and cache sizes.

Promise: greedy and seeded requests get exactly the reference's tokens, no matter what else the engine does.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import generate
from toy_requests import asked_again, submits_lists

from engine.core.drafter import Drafter, NoDrafter
from engine.core.step import ForwardInput, ForwardResult
from engine.draft.first_of import FirstOf
from engine.errors import ConfigError, ShardDown
from engine.lookup.ngram import Lookup, NgramDrafter
from engine.messages import SamplingParams, SpeculativeOptions, Submit
from engine.proposals.drafter import MergedDrafter

VOCAB = 7
METHODS = (
    "none",
    "ngram",
    "draft_model",
    "draft_model_reduced",
    "draft_model_small_pool",
    "draft_model+lookup",
    "merged",
)


def make_drafter(method: str, block_size: int) -> Drafter:
    if method == "none":
        return NoDrafter()
    if method == "ngram":
        return NgramDrafter(min_size=1, max_size=3)
    if method.endswith("+lookup"):
        model = make_drafter(method.removesuffix("+lookup"), block_size)
        return FirstOf(NgramDrafter(min_size=2, max_size=3), model, source="lookup")
    if method == "merged":
        model = make_drafter("draft_model", block_size)
        return MergedDrafter(Lookup(min_size=1, max_size=3), model)
    if method == "draft_model_reduced":
        draft = ToyModel(vocab_size=VOCAB, columns=5, block_size=block_size, seed=3)
        return toy_drafter(draft, vocab=torch.tensor([6, 1, 4, 0, 2]), max_request_tokens=9)
    num_blocks = 12 if method == "draft_model_small_pool" else 64
    draft = ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size, seed=3, blend=0.3)
    return toy_drafter(draft, num_blocks=num_blocks, max_request_tokens=12)


SUBMITS = submits_lists(
    VOCAB,
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        max_tokens=st.integers(1, 14),
        seed=st.integers(0, 2**63 - 1),
        stop_token_ids=st.sampled_from([(), (0,), (0, 3)]),
    ),
    st.builds(SpeculativeOptions, enabled=st.booleans(), max_k=st.sampled_from([None, 0, 2])),
)


@settings(max_examples=250)
@given(
    submits=SUBMITS,
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 4]),
    spare_tokens=st.sampled_from([0, 8, 200]),
    prefix_cache=st.booleans(),
    max_step_tokens=st.sampled_from([4, 7, 32]),
)
def test_every_request_gets_the_reference_tokens(
    submits: list[Submit],
    method: str,
    seed: int,
    block_size: int,
    spare_tokens: int,
    prefix_cache: bool,
    max_step_tokens: int,
) -> None:
    max_model_len = 32
    num_blocks = 1 + -(-(max_model_len + spare_tokens) // block_size)
    target = ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size)
    engine = ToyEngine(
        target,
        make_drafter(method, block_size),
        RandomPacer(seed, max_k=6),
        num_blocks=num_blocks,
        prefix_cache=prefix_cache,
        max_num_requests=4,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
    )
    # Submitted twice, so that the second pass meets a warm prefix cache.
    for submit_round in (submits, asked_again(submits)):
        result = engine.run(submit_round)
        for submit in submit_round:
            expected = generate(target.logits_after, submit.prompt, submit.sampling, max_model_len).tokens
            assert result[submit.request_id] == expected
            last = engine.deltas[submit.request_id][-1]
            stopped = bool(expected) and expected[-1] in submit.sampling.stop_token_ids
            assert last.finish_reason == ("stop" if stopped else "length")
            assert last.num_accepted <= last.num_drafted
            if not submit.speculative.enabled or submit.speculative.max_k == 0:
                assert last.num_drafted == 0
    assert engine.pool.num_free == num_blocks - 1


@settings(max_examples=100)
@given(submits=SUBMITS, method=st.sampled_from(METHODS), seed=st.integers(0, 2**32))
def test_aborts_free_blocks_and_leave_neighbours_alone(submits: list[Submit], method: str, seed: int) -> None:
    rng = random.Random(seed)
    target = ToyModel(vocab_size=VOCAB, num_blocks=24, block_size=2)
    engine = ToyEngine(
        target, make_drafter(method, 2), RandomPacer(seed, 4), num_blocks=24, max_num_requests=3, max_model_len=40
    )
    for submit in submits:
        engine.engine.submit(submit)
    engine.engine.drain()
    aborted: set[str] = set()
    while engine.engine.scheduler.has_work:
        if rng.random() < 0.2:
            victim = rng.choice(submits).request_id
            if not any(d.finish_reason for d in engine.deltas.get(victim, [])):
                aborted.add(victim)
                engine.engine.abort(victim)
        engine.step()
    assert engine.pool.num_free == 23
    for submit in submits:
        expected = generate(target.logits_after, submit.prompt, submit.sampling, 40).tokens
        got = engine.tokens_of(submit.request_id)
        ends = [d.finish_reason for d in engine.deltas[submit.request_id] if d.finish_reason]
        assert len(ends) == 1, "every request ends exactly once"
        if submit.request_id in aborted:
            assert ends == ["abort"]
            assert got == expected[: len(got)]
        else:
            assert got == expected


def test_a_long_prompt_does_not_starve_running_requests() -> None:
    target = ToyModel(vocab_size=VOCAB, num_blocks=200, block_size=4)
    engine = ToyEngine(
        target, NoDrafter(), FixedPacer(0), num_blocks=200, max_num_requests=4, max_step_tokens=16, max_model_len=600
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    engine.engine.submit(Submit(request_id="short", prompt=(1, 2), sampling=greedy))
    engine.step()
    engine.engine.submit(Submit(request_id="long", prompt=(3,) * 500, sampling=greedy))
    for _ in range(30):
        before = len(engine.tokens_of("short"))
        engine.step()
        assert len(engine.tokens_of("short")) == before + 1, "one token in every step, during any prefill"


def test_a_request_says_how_long_it_queued() -> None:
    """One runs at a time, so the second waits for as long as the first runs."""
    target = ToyModel(vocab_size=VOCAB, num_blocks=50, block_size=4)
    engine = ToyEngine(target, NoDrafter(), FixedPacer(0), num_blocks=50, max_num_requests=1, max_model_len=40)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    for name in ("first", "second"):
        engine.engine.submit(Submit(request_id=name, prompt=(1, 2), sampling=greedy))
    engine.engine.drain()
    while not any(delta.finish_reason for delta in engine.deltas.get("first", [])):
        engine.step()
        time.sleep(0.001)
    while engine.engine.scheduler.has_work:
        engine.step()
    first, second = ({delta.queue_s for delta in engine.deltas[name]} for name in ("first", "second"))
    assert len(first) == len(second) == 1, "equal in every delta"
    assert second.pop() >= first.pop() + 0.007  # seven steps of a millisecond lie between


def test_drafting_takes_fewer_steps_and_a_perfect_draft_is_always_accepted() -> None:
    def steps(drafter: Drafter, k: int) -> tuple[int, float]:
        target = ToyModel(vocab_size=VOCAB)
        pacer = FixedPacer(k)
        engine = ToyEngine(target, drafter, pacer)
        engine.run([Submit(request_id="r", prompt=(1, 2, 3), sampling=SamplingParams(temperature=0.0, max_tokens=60))])
        last = engine.deltas["r"][-1]
        return len(pacer.stats), last.num_accepted / max(1, last.num_drafted)

    plain, _ = steps(NoDrafter(), 0)
    perfect, rate = steps(toy_drafter(ToyModel(vocab_size=VOCAB)), 5)
    assert plain == 60
    assert perfect <= 1 + -(-59 // 6) + 1
    assert rate == 1.0


def test_acceptance_does_not_depend_on_the_prefix_cache() -> None:
    def accepted(prefix_cache: bool) -> list[tuple[int, int]]:
        target = ToyModel(vocab_size=VOCAB)
        drafter = toy_drafter(ToyModel(vocab_size=VOCAB, seed=5, blend=0.4))
        engine = ToyEngine(target, drafter, FixedPacer(4), prefix_cache=prefix_cache)
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        for i in range(3):
            engine.run([Submit(request_id=f"r{i}", prompt=(1, 2, 3, 4, 5, 6, 1, 2, 3), sampling=greedy)])
        return [(engine.deltas[f"r{i}"][-1].num_drafted, engine.deltas[f"r{i}"][-1].num_accepted) for i in range(3)]

    assert accepted(True) == accepted(False)


def test_after_a_pause_the_draft_catches_up_and_acceptance_is_what_it_was() -> None:
    class Pausing(FixedPacer):
        def choose(self, plan, decodes, num_prefill_rows):  # type: ignore[no-untyped-def]
            paused = 10 <= len(self.stats) < 40
            self._k = 0 if paused else 3
            return super().choose(plan, decodes, num_prefill_rows)

    target = ToyModel(vocab_size=VOCAB, num_blocks=200)
    drafter = toy_drafter(ToyModel(vocab_size=VOCAB, num_blocks=200), num_blocks=200, max_request_tokens=8)
    pacer = Pausing(3)
    engine = ToyEngine(target, drafter, pacer, num_blocks=200, max_model_len=400)
    engine.run([Submit(request_id="r", prompt=(1, 2), sampling=SamplingParams(temperature=0.0, max_tokens=200))])
    after = [s for s in pacer.stats[40:-2] if s.num_drafted]
    assert after
    assert all(s.num_accepted == s.num_drafted for s in after), "the draft equals the target, so all must be accepted"
    assert any("catch_up" in s.k_by_reason for s in pacer.stats[40:])


def test_a_request_that_arrives_while_the_engine_fails_is_ended_as_well() -> None:
    class FailingModel(ToyModel):
        def forward(self, plan: ForwardInput) -> ForwardResult:
            engine.engine.submit(Submit(request_id="late", prompt=(1,), sampling=SamplingParams()))
            raise ShardDown("the shard is gone")

    engine = ToyEngine(FailingModel(vocab_size=VOCAB), NoDrafter(), FixedPacer(0))
    engine.engine.submit(Submit(request_id="early", prompt=(1,), sampling=SamplingParams()))
    with pytest.raises(ShardDown):
        engine.engine.run(threading.Event())
    for name in ("early", "late"):
        assert [delta.finish_reason for delta in engine.deltas[name]] == ["abort"]
    assert not engine.engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks - 1


def test_the_statistics_name_an_aborted_request_once() -> None:
    pacer = FixedPacer(0)
    engine = ToyEngine(ToyModel(vocab_size=VOCAB), NoDrafter(), pacer)
    for name in ("aborted", "other"):
        engine.engine.submit(Submit(request_id=name, prompt=(1,), sampling=SamplingParams(max_tokens=9)))
    engine.step()
    engine.engine.abort("aborted")
    for _ in range(3):
        engine.step()
    assert [stats.ended for stats in pacer.stats] == [(), (1,), (), ()]


def test_a_turn_of_the_loop_is_counted_without_work_too() -> None:
    engine, stop = ToyEngine(ToyModel(vocab_size=VOCAB), NoDrafter(), FixedPacer(0)).engine, threading.Event()
    engine.call(stop.set)
    engine.run(stop)
    assert engine.num_turns == 1


def test_contradicting_limits_are_refused() -> None:
    target = ToyModel(vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="max_step_tokens"):
        ToyEngine(target, NoDrafter(), FixedPacer(0), max_num_requests=33, max_step_tokens=32)
    with pytest.raises(ConfigError, match="max_model_len"):
        ToyEngine(target, NoDrafter(), FixedPacer(0), num_blocks=4, max_model_len=64)
