"""Every sampling option at every drafted and verified position, with both implementations of the acceptance rules.

Promise: greedy and seeded requests get exactly the tokens of the reference, which is written from the definitions.
Unseeded requests follow its distribution. Odds: each chi-square is compared with its 1e-6 quantile, so a correct
implementation fails about once in 18,000 runs of a batch of 56 distributions.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel, toy_drafter, toy_grammars
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Spelling, equal_logprobs, generate, processed, sequence_distribution, target_distribution
from statistic import joint_p_value, p_value
from toy_requests import asked_again, submits_lists
from tree_drafts import RandomMerges, RandomTrees

from engine.core.acceptance import AcceptanceKind
from engine.core.drafter import Drafter, NoDrafter
from engine.draft.first_of import FirstOf
from engine.draft.grammar import GrammarDrafter
from engine.draft.messages import decode_options, encode_options
from engine.lookup.ngram import NgramDrafter
from engine.messages import GrammarSpec, SamplingParams, SpeculativeOptions, Submit
from engine.sampling.distribution import warp
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns, LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

VOCAB = 7
ODDS = 1e-6
REGEX = GrammarSpec(kind="regex", text="(ab|c){1,3}a?")
CHOICE = GrammarSpec(kind="choice", text='["abcab", "ba", "abab"]')
NESTED = GrammarSpec(kind="ebnf", text='root ::= "a" root "b" | "c"')
DEAD_END = GrammarSpec(kind="choice", text='["abd", "bab", "caa"]')
SPELLING = Spelling(
    of_token=("", "a", "b", "ab", "c", "ba", "ca"),
    end_ids=(0,),
    texts={
        REGEX: frozenset(
            "".join(parts) + end
            for n in (1, 2, 3)
            for parts in itertools.product(("ab", "c"), repeat=n)
            for end in ("", "a")
        ),
        CHOICE: frozenset({"abcab", "ba", "abab"}),
        NESTED: frozenset("a" * n + "c" + "b" * n for n in range(40)),
        DEAD_END: frozenset({"abd", "bab", "caa"}),
    },
)
METHODS = (
    *("none", "ngram", "draft_model", "draft_model_reduced", "draft_model_small_pool", "draft_model_on_device"),
    *("trees", "certain_trees", "merged_trees"),
)


def make_drafter(method: str, block_size: int = 4, sharpness: float = 1.5) -> Drafter:
    if method == "none":
        return FirstOf(GrammarDrafter(), NoDrafter(), source="grammar")
    if method == "ngram":
        return FirstOf(GrammarDrafter(), NgramDrafter(min_size=1, max_size=3), source="grammar")
    if method.endswith("trees"):
        model = ToyModel(vocab_size=VOCAB, seed=3, blend=0.3, sharpness=sharpness)
        if method == "merged_trees":
            return RandomMerges(model, 7)
        return RandomTrees(model, 7, certain=method == "certain_trees")
    if method == "draft_model_reduced":
        draft = ToyModel(
            vocab_size=VOCAB, columns=5, num_blocks=256, block_size=block_size, seed=3, sharpness=sharpness
        )
        return toy_drafter(
            draft, num_blocks=256, vocab=torch.tensor([6, 1, 4, 0, 2]), max_request_tokens=99, spelling=SPELLING
        )
    num_blocks = 12 if method == "draft_model_small_pool" else 256
    draft = ToyModel(
        vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size, seed=3, blend=0.3, sharpness=sharpness
    )
    on_device = method == "draft_model_on_device"
    drafter: Drafter = toy_drafter(
        draft, num_blocks=num_blocks, max_request_tokens=120, spelling=SPELLING, on_device=on_device
    )
    return FirstOf(GrammarDrafter(), drafter, source="grammar") if method == "draft_model_small_pool" else drafter


def neutral_or(value: Any, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(value), strategy)


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_p=neutral_or(1.0, st.floats(0.05, 0.99)),
    top_k=neutral_or(0, st.integers(1, VOCAB + 2)),
    min_p=neutral_or(0.0, st.floats(0.01, 0.9)),
    presence_penalty=neutral_or(0.0, st.floats(-2, 2)),
    frequency_penalty=neutral_or(0.0, st.floats(-2, 2)),
    repetition_penalty=neutral_or(1.0, st.floats(0.3, 3)),
    logit_bias=neutral_or(
        (), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 5)).map(lambda d: tuple(d.items()))
    ),
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 6),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.sampled_from([(), (0,), (0, 3)]),
    num_logprobs=st.sampled_from([None, None, 0, 3]),
    num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    grammar=neutral_or(None, st.sampled_from([REGEX, CHOICE, NESTED, DEAD_END])),
)
SUBMITS = submits_lists(
    VOCAB,
    SAMPLINGS,
    st.builds(SpeculativeOptions, enabled=st.sampled_from([True, True, False]), max_k=st.sampled_from([None, None, 2])),
)


@settings(max_examples=400)
@given(
    submits=SUBMITS,
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 4]),
    spare_tokens=st.sampled_from([0, 8, 200]),
    max_step_tokens=st.sampled_from([4, 7, 32]),
    acceptance=st.sampled_from(["together", "each"]),
)
def test_every_option_gives_what_the_definitions_say(
    submits: list[Submit],
    method: str,
    seed: int,
    block_size: int,
    spare_tokens: int,
    max_step_tokens: int,
    acceptance: AcceptanceKind,
) -> None:
    max_model_len = 32
    num_blocks = 1 + -(-(max_model_len + spare_tokens) // block_size)
    target = ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size)
    engine = ToyEngine(
        target,
        make_drafter(method, block_size),
        RandomPacer(seed, max_k=6),
        num_blocks=num_blocks,
        max_num_requests=4,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        grammars=toy_grammars(SPELLING),
        acceptance=acceptance,
    )
    # Submitted twice, so that the second pass meets a warm prefix cache.
    for submit_round in (submits, asked_again(submits)):
        engine.run(submit_round)
        for submit in submit_round:
            expected = generate(target.logits_after, submit.prompt, submit.sampling, max_model_len, SPELLING)
            got = engine.result_of(submit.request_id)
            assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)
            assert equal_logprobs(got.logprobs, expected.logprobs, bound=1e-4)
            if got.tokens:
                assert equal_logprobs(got.prompt_logprobs, expected.prompt_logprobs, bound=1e-4)
    assert engine.pool.num_free == num_blocks - 1


PROMPT = (0, 1, 0, 1, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.75},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.25},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.9},
    "bias": {"logit_bias": ((1, 1.5), (4, -2.0), (0, 1.0))},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (0, 4)},
    "grammar": {"grammar": NESTED, "stop_token_ids": (0,)},
}
COMBINATIONS = [(name,) for name in OPTIONS] + list(
    itertools.combinations([name for name in OPTIONS if name != "plain"], 2)
)


@pytest.mark.parametrize(
    ("method", "runs", "acceptance"),
    [
        *(
            ("draft_model", 220, "together"),
            ("draft_model_reduced", 80, "together"),
            ("draft_model_reduced", 80, "each"),
        ),
        *(("trees", 150, "together"), ("trees", 150, "each"), ("certain_trees", 80, "each")),
        *(("merged_trees", 80, "together"), ("merged_trees", 80, "each")),
    ],
)
def test_each_option_and_each_pair_follows_its_distribution_in_one_mixed_batch(
    method: str, runs: int, acceptance: AcceptanceKind
) -> None:
    """Every row of every batch has other options; K is random per row and step. Every third run is seeded."""
    target = ToyModel(vocab_size=VOCAB, num_blocks=256, sharpness=2.2)
    engine = ToyEngine(
        target,
        make_drafter(method, sharpness=2.2),
        RandomPacer(5, max_k=6 if method.endswith("trees") else 4),
        max_step_tokens=260,
        max_num_requests=32,
        num_blocks=256,
        grammars=toy_grammars(SPELLING),
        acceptance=acceptance,
    )
    wanted = {
        names: SamplingParams(**{"max_tokens": 5, **{k: v for name in names for k, v in OPTIONS[name].items()}})
        for names in COMBINATIONS
    }
    submits = [
        Submit(
            request_id=f"{'+'.join(names)}/{run}",
            prompt=PROMPT,
            sampling=replace(sampling, seed=run if run % 3 == 0 else None),
        )
        for run in range(runs)
        for names, sampling in wanted.items()
    ]
    counts: dict[str, dict[tuple[int, ...], int]] = {}
    for request_id, tokens in engine.run(submits).items():
        outcomes = counts.setdefault(request_id.split("/")[0], {})
        outcomes[tuple(tokens)] = outcomes.get(tuple(tokens), 0) + 1
    distributions = {
        names: (counts["+".join(names)], sequence_distribution(target.logits_after, PROMPT, sampling, SPELLING))
        for names, sampling in wanted.items()
    }
    assert {names: p for names, pair in distributions.items() if (p := p_value(*pair)) < ODDS} == {}
    assert joint_p_value(list(distributions.values())) > ODDS
    assert sum(engine.deltas[submit.request_id][-1].num_drafted for submit in submits) > len(submits)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_each_option_changes_the_distribution_so_that_dropping_it_would_be_seen(name: str) -> None:
    target = ToyModel(vocab_size=VOCAB)
    wanted = SamplingParams(**{"max_tokens": 3, **OPTIONS[name]})
    plain = SamplingParams(max_tokens=3, stop_token_ids=wanted.stop_token_ids)
    with_option, without = (sequence_distribution(target.logits_after, PROMPT, s, SPELLING) for s in (wanted, plain))
    distance = sum(abs(with_option.get(a, 0) - without.get(a, 0)) for a in {*with_option, *without}) / 2
    assert distance > 0.15


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("seed", [None, 3], ids=["rejection", "coupled"])
def test_a_draft_that_is_the_target_is_always_accepted(name: str, seed: int | None) -> None:
    """Both are warped alike under every option: with q = p nothing is ever rejected."""
    options = {**OPTIONS[name], "max_tokens": 40, "seed": seed, "stop_token_ids": ()}
    if name == "min_tokens":
        options |= {"min_tokens": 39, "stop_token_ids": (0, 4)}
    target = ToyModel(vocab_size=VOCAB, num_blocks=200)
    grammars = toy_grammars(SPELLING)
    drafter = toy_drafter(ToyModel(vocab_size=VOCAB, num_blocks=200), num_blocks=200, grammars=grammars)
    engine = ToyEngine(target, drafter, FixedPacer(4), num_blocks=200, grammars=grammars)
    engine.run([Submit(request_id=f"r{i}", prompt=PROMPT, sampling=SamplingParams(**options)) for i in range(8)])
    last = [engine.deltas[f"r{i}"][-1] for i in range(8)]
    assert sum(delta.num_drafted for delta in last) > 8
    # A sequence may end before its last drafts; those are neither accepted nor rejected.
    assert all(delta.num_drafted - delta.num_accepted <= 4 for delta in last)


@settings(max_examples=200)
@given(
    sampling=SAMPLINGS.filter(lambda s: s.temperature > 0 and s.grammar is None),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    drafted=st.lists(st.integers(0, VOCAB - 1), max_size=4),
)
def test_rules_and_cuts_equal_the_definitions_at_every_drafted_position(
    sampling: SamplingParams, prompt: list[int], generated: list[int], drafted: list[int]
) -> None:
    options = TokenOptions.of(sampling, len(prompt))
    logits = torch.tensor(ToyModel(vocab_size=VOCAB)._table[: len(drafted) + 1, 0], dtype=torch.float32)
    shaped, half = logits.clone(), logits[:, [5, 2, 6]].clone()
    if options is not None:
        logits_processor = LogitsProcessor(options)
        logits_processor.follow(prompt + generated)
        for some, columns in ((shaped, None), (half, Columns(torch.tensor([5, 2, 6])))):
            shaper = BatchLogitsProcessor(columns)
            for row, token in enumerate([*drafted, None]):
                shaper.add(row, logits_processor)
                if token is not None:
                    logits_processor.push(token)
            shaper.apply(some)
            logits_processor.rewind(len(prompt) + len(generated))
    assert torch.equal(half, shaped[:, [5, 2, 6]])
    distribution = RowSampling(sampling.temperature, sampling.top_p, 0, 0, False, sampling.top_k, sampling.min_p)
    probs = warp(shaped, [distribution] * len(shaped))
    for row in range(len(drafted) + 1):
        allowed = processed(logits[row].numpy(), prompt, generated + drafted[:row], sampling, SPELLING)
        assert allowed is not None
        assert torch.allclose(probs[row].double(), torch.from_numpy(target_distribution(allowed, sampling)), atol=1e-5)


def test_neutral_options_cost_nothing() -> None:
    neutral = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(1,), num_logprobs=3)
    assert TokenOptions.of(neutral, 10) is None
    assert TokenOptions.of(replace(neutral, min_tokens=3, stop_token_ids=()), 10) is None
    for change in ("presence", "frequency", "repetition", "bias", "grammar", "min_tokens"):
        assert TokenOptions.of(replace(neutral, **OPTIONS[change]), 10) is not None


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.999, 0.0), (300, 1.0, 0.0), (400, 0.9, 0.0), (0, 0.5, 0.02)]
)
def test_a_cut_wider_than_the_head_equals_the_definition(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2000)
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    samplings = [RowSampling(1.0, top_p, 0, 0, False, top_k, min_p)] * 3
    warped = warp(logits, samplings, nucleus="head")
    assert torch.equal(warped, warp(logits, samplings, nucleus="sort"))
    for row, probs in zip(logits, warped, strict=True):
        expected = torch.from_numpy(target_distribution(row.numpy(), sampling))
        assert (probs.double() - expected).abs().sum() < 2e-3  # one token at the threshold may differ by rounding


def test_equally_likely_tokens_are_kept_or_left_out_together() -> None:
    """bf16 logits tie often; which of two comes first in a sort must not matter."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for distribution in (RowSampling(1.0, 1.0, 0, 0, False, 2), RowSampling(1.0, 0.6, 0, 0, False)):
        probs = warp(logits, [distribution])[0]
        assert probs[1] == probs[2] == probs[3] > 0
        assert probs[4] == 0


def test_options_reach_the_draft_or_are_counted() -> None:
    """A request whose options do not fit gets no draft, with the reason. Other requests are unchanged."""
    target = ToyModel(vocab_size=VOCAB)
    drafter = toy_drafter(ToyModel(vocab_size=VOCAB), spelling=SPELLING)
    drafter._max_options = 250
    pacer = FixedPacer(3)
    engine = ToyEngine(target, drafter, pacer, grammars=toy_grammars(SPELLING))
    small = SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=0.5)
    large = replace(small, logit_bias=((2, 0.25),) * 40)
    submits = [Submit(request_id=name, prompt=PROMPT, sampling=s) for name, s in (("small", small), ("large", large))]
    engine.run(submits)
    for submit in submits:
        expected = generate(target.logits_after, PROMPT, submit.sampling, 128).tokens
        assert engine.tokens_of(submit.request_id) == expected
    assert engine.deltas["small"][-1].num_drafted > 0
    assert engine.deltas["large"][-1].num_drafted == 0
    assert sum(stats.k_by_reason.get("options", 0) for stats in pacer.stats) > 10


@pytest.mark.parametrize("value", [float("nan"), 1e300, -1e300])
def test_options_that_cannot_be_computed_with_end_their_request_only(value: float) -> None:
    target = ToyModel(vocab_size=VOCAB)
    engine = ToyEngine(target, NoDrafter(), FixedPacer(0))
    bad = SamplingParams(temperature=0.0, presence_penalty=value)
    good = SamplingParams(temperature=0.0, max_tokens=5)
    engine.run([Submit(request_id=name, prompt=PROMPT, sampling=s) for name, s in (("bad", bad), ("good", good))])
    assert [delta.finish_reason for delta in engine.deltas["bad"]] == ["error"]
    assert "finite" in (engine.deltas["bad"][0].error or "")
    assert len(engine.tokens_of("good")) == 5


def test_a_draft_without_a_tokenizer_leaves_grammars_to_the_target() -> None:
    target = ToyModel(vocab_size=VOCAB)
    drafter, pacer = toy_drafter(ToyModel(vocab_size=VOCAB)), FixedPacer(3)
    engine = ToyEngine(target, drafter, pacer, grammars=toy_grammars(SPELLING))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, grammar=NESTED, logit_bias=((4, -6.0),))
    engine.run([Submit(request_id="r", prompt=PROMPT, sampling=sampling)])
    assert engine.tokens_of("r") == generate(target.logits_after, PROMPT, sampling, 128, SPELLING).tokens
    assert sum(stats.k_by_reason.get("options", 0) for stats in pacer.stats) > 0


def test_options_survive_their_encoding() -> None:
    options = TokenOptions.of(SamplingParams(**{k: v for name in OPTIONS for k, v in OPTIONS[name].items()}), 5)
    assert options is not None
    assert asdict(decode_options(encode_options(options))) == asdict(options)
