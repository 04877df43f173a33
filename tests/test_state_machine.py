"""Scheduler, block pool and committer under random arrivals, cancels, K schedules, preemptions and changes of engine.

Promise, checked after every step: the pool's references are the requests' blocks, waiting requests hold no block, every
cached token has a block, and the emitted tokens are a prefix of what one-token-at-a-time generation gives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fakes import RandomPacer, ToyEngine, ToyModel, toy_drafter
from fuzzing import sample
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference import generate
from toy_requests import prompts
from tree_drafts import RandomTrees

from engine.core.drafter import Drafter, NoDrafter
from engine.lookup.ngram import Lookup, NgramDrafter
from engine.messages import SamplingParams, SpeculativeOptions, Submit
from engine.proposals.drafter import MergedDrafter

VOCAB = 7
MAX_MODEL_LEN = 32
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    min_tokens=st.sampled_from([0, 3]),
    max_tokens=st.integers(1, 14),
    seed=st.integers(0, 1000),
    stop_token_ids=st.sampled_from([(), (0,)]),
)
SPECULATIVE = st.builds(SpeculativeOptions, enabled=st.booleans(), max_k=st.sampled_from([None, 0, 2]))


class EngineMachine(RuleBasedStateMachine):
    """One engine, or several in succession, and every request that was submitted to them."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare_tokens=st.sampled_from([0, 6, 60]),
        prefix_cache=st.booleans(),
        method=st.sampled_from(
            ["none", "ngram", "draft_model", "model_trees", "merged_trees", "trees", "certain_trees"]
        ),
        max_num_requests=st.integers(1, 4),
        max_step_tokens=st.sampled_from([4, 9, 32]),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        block_size: int,
        spare_tokens: int,
        prefix_cache: bool,
        method: str,
        max_num_requests: int,
        max_step_tokens: int,
        seed: int,
    ) -> None:
        self.num_blocks = 1 + -(-(MAX_MODEL_LEN + spare_tokens) // block_size)
        self.block_size, self.method, self.seed = block_size, method, seed
        self.limits = {
            "prefix_cache": prefix_cache,
            "max_num_requests": max_num_requests,
            "max_step_tokens": max_step_tokens,
        }
        self.submits: dict[str, Submit] = {}
        self.emitted: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()
        self.ended: set[str] = set()
        self.engine = self.make_engine()

    def make_engine(self) -> ToyEngine:
        self.seed += 1
        self.target = ToyModel(vocab_size=VOCAB, num_blocks=self.num_blocks, block_size=self.block_size)
        return ToyEngine(
            self.target,
            self.make_drafter(),
            RandomPacer(self.seed, max_k=6),
            num_blocks=self.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            **self.limits,
        )

    def make_drafter(self) -> Drafter:
        if self.method == "none":
            return NoDrafter()
        if self.method == "ngram":
            return NgramDrafter(min_size=1, max_size=3)
        if self.method in ("trees", "certain_trees"):
            model = ToyModel(vocab_size=VOCAB, seed=3, blend=0.3)
            return RandomTrees(model, self.seed, certain=self.method == "certain_trees")
        draft = ToyModel(vocab_size=VOCAB, num_blocks=16, block_size=self.block_size, seed=3, blend=0.3)
        width = 3 if self.method in ("model_trees", "merged_trees") else 1
        model_drafter = toy_drafter(draft, num_blocks=16, max_request_tokens=12, width=width)
        if self.method == "merged_trees":
            return MergedDrafter(Lookup(min_size=1, max_size=3), model_drafter)
        return model_drafter

    @rule(
        prompt=prompts(VOCAB),
        sampling=SAMPLING,
        speculative=SPECULATIVE,
        client=st.sampled_from("ab"),
        priority=st.sampled_from(["high", "normal", "low"]),
    )
    def arrive(self, prompt, sampling, speculative, client, priority) -> None:  # type: ignore[no-untyped-def]
        name = f"r{len(self.submits)}"
        self.submits[name] = Submit(
            request_id=name,
            prompt=prompt,
            sampling=sampling,
            speculative=speculative,
            client=client,
            priority=priority,
        )
        self.emitted[name] = []
        self.expected[name] = generate(self.target.logits_after, prompt, sampling, MAX_MODEL_LEN).tokens
        self.engine.engine.submit(self.submits[name])

    @rule(pick=st.integers(0, 2**16))
    def cancel(self, pick: int) -> None:
        running = [name for name in self.submits if name not in self.ended]
        if running:
            name = running[pick % len(running)]
            self.cancelled.add(name)
            self.engine.engine.abort(name)
            self.engine.engine.drain()
            assert not any(request.submit.request_id == name for request in self.holders()), "gone at once"
            self.take()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.take()
            self.check()

    @rule()
    def engine_dies_and_another_goes_on(self) -> None:
        old = self.engine
        old.engine.drain()
        self.take()
        self.engine = self.make_engine()
        for name, submit in self.submits.items():
            if name not in self.ended:
                self.engine.engine.submit(replace(submit, generated=tuple(self.emitted[name])))

    def take(self) -> None:
        """Read what the engine has published."""
        for name, deltas in self.engine.deltas.items():
            for delta in deltas:
                assert name not in self.ended, "nothing comes after the end"
                self.emitted[name] += delta.token_ids
                if delta.finish_reason is not None:
                    self.ended.add(name)
                    assert delta.finish_reason in (("abort",) if name in self.cancelled else ("stop", "length"))
        self.engine.deltas.clear()

    def holders(self) -> list:  # type: ignore[type-arg]
        return list(self.engine.engine.scheduler.requests())

    def check(self) -> None:
        scheduler, pool = self.engine.engine.scheduler, self.engine.pool
        requests = self.holders()
        assert len(requests) == len({request.key for request in requests})
        held = Counter(block for request in requests for block in request.block_ids)
        assert set(held) == set(pool._references), "only requests hold blocks"
        assert held == pool._references
        for index, request in enumerate(requests):
            if index >= scheduler.num_running:
                assert request.block_ids == [], "a waiting request holds no block"
                assert request.num_computed == 0
            assert request.num_computed <= len(request.block_ids) * self.block_size
            assert request.num_computed < len(request.tokens)
            assert len(request.tokens) <= MAX_MODEL_LEN

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.pool.check()
        for name, tokens in self.emitted.items():
            assert tokens == self.expected[name][: len(tokens)], name
            if name in self.ended and name not in self.cancelled:
                assert tokens == self.expected[name]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            self.engine.engine.drain()
            if not self.engine.engine.has_work:
                break
            self.engine.step()
        self.take()
        self.books_balance()
        assert self.ended == set(self.submits), "every request ends"
        assert self.engine.pool.num_free == self.num_blocks - 1, "every block comes back"


TestEngine = EngineMachine.TestCase
TestEngine.settings = sample(20, stateful_step_count=40)
