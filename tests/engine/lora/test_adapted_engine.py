"""Whole engines with adapters: requests of several adapters and of the base model in one batch.

Promise, greedy in float32: every request gets the tokens of the model with its adapter merged, whatever is drafted, on
one shard or two, with prefixes cached, under preemption, and while adapters come and go.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import FixedPacer, RandomPacer
from local_engine import LocalEngine
from native_library import needs_library
from tiny_adapters import write_adapter, write_merged
from tiny_models import VOCAB, write_model

from engine.errors import ConfigError
from engine.messages import AdapterRef, SamplingParams, Submit

FIRST, SECOND = AdapterRef(number=1, name="first"), AdapterRef(number=2, name="second")
ADAPTERS = (None, FIRST, SECOND)
NUM_TOKENS = 16
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"speculative": {"method": "ngram", "k": 6, "ngram_min": 1}, "pacer": FixedPacer(6)},
    "lookup-random": {"speculative": {"method": "ngram", "k": 6, "ngram_min": 1}, "pacer": RandomPacer(3, max_k=6)},
    "tp2": {"tensor_parallel_size": 2},
    "tp3-lookup": {"tensor_parallel_size": 3, "speculative": {"method": "ngram", "k": 4}, "pacer": FixedPacer(4)},
    "chunked": {"max_step_tokens": 16, "max_num_requests": 6},
    "preempting": {"kv_cache_tokens": 112, "max_model_len": 96, "prefix_cache": False},
    "draft": {"draft": True, "speculative": {"k": 4}, "pacer": RandomPacer(5, max_k=4)},
}


class Models:
    """A model, two adapters of it, and the tokens that each of the three should generate."""

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder / "model", "qwen2")
        self.adapters = {
            FIRST: write_adapter(folder / "first", self.model, rank=4, seed=1),
            SECOND: write_adapter(
                folder / "second", self.model, rank=2, seed=2, targets=("q_proj", "v_proj", "up_proj")
            ),
        }
        merged = {
            ref: write_merged(folder / f"{ref.name}-merged", self.model, path) for ref, path in self.adapters.items()
        }
        self.expected: dict[str, list[int]] = {}
        for adapter in ADAPTERS:
            with LocalEngine(self.model if adapter is None else merged[adapter]) as engine:
                submits = [submit for submit in self.submits() if submit.adapter == adapter]
                self.expected |= engine.generate([_plain(submit) for submit in submits])

    def submits(self) -> list[Submit]:
        """Nine requests; three prompts of equal beginnings, each for the base model and both adapters."""
        rng = random.Random(4)
        shared = [rng.randrange(VOCAB) for _ in range(33)]
        prompts = [[*shared, rng.randrange(VOCAB)] for _ in range(3)]
        return [
            request(f"{index}-{adapter.name if adapter else 'base'}", prompt, adapter)
            for index, prompt in enumerate(prompts)
            for adapter in ADAPTERS
        ]

    def loaded(self, engine: LocalEngine) -> LocalEngine:
        for ref, folder in self.adapters.items():
            engine.load_adapter(ref, folder)
        return engine


def request(name: str, prompt: list[int], adapter: AdapterRef | None, num_tokens: int = NUM_TOKENS) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return Submit(request_id=name, prompt=tuple(prompt), sampling=sampling, adapter=adapter)


def _plain(submit: Submit) -> Submit:
    return request(submit.request_id, list(submit.prompt), None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("mode", MODES)
def test_mixed_batches_give_the_tokens_of_each_merged_model(models: Models, tmp_path: Path, mode: str) -> None:
    settings = dict(MODES[mode])
    if settings.pop("draft", False):
        settings["draft_folder"] = write_model(tmp_path / "draft", "qwen2", seed=1)
    with LocalEngine(models.model, lora={}, **settings) as engine:
        models.loaded(engine)
        assert engine.generate(models.submits()) == models.expected
        if mode == "preempting":
            assert engine.num_preempted > 0
        if "lookup" in mode:
            assert sum(stats.num_accepted for stats in engine.stats) > 0
    assert len({tuple(tokens) for tokens in models.expected.values()}) == 9, "the adapters change nothing"


@needs_library
def test_on_the_native_kernel_drafts_change_no_token(tmp_path: Path) -> None:
    """bfloat16: the tokens of each request alone and without drafts, bit for bit, in a mixed batch with drafts."""
    model = write_model(
        tmp_path / "model", "qwen2", hidden_size=96, intermediate_size=160, head_dim=64, num_attention_heads=6
    )
    adapters = {ref: write_adapter(tmp_path / ref.name, model, seed=ref.number) for ref in (FIRST, SECOND)}
    rng = random.Random(6)
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] * 2 for _ in range(2)]
    submits = [
        request(f"{index}-{adapter.name if adapter else 'base'}", prompt, adapter)
        for index, prompt in enumerate(prompts)
        for adapter in ADAPTERS
    ]
    options: dict[str, Any] = {"dtype": "bfloat16", "kernel": "native", "lora": {}}
    drafted = {"speculative": {"method": "ngram", "k": 6, "ngram_min": 1}, "pacer": RandomPacer(3, max_k=6)}
    outputs = []
    for settings in ({}, drafted):
        with LocalEngine(model, **options, **settings) as engine:
            for ref, folder in adapters.items():
                engine.load_adapter(ref, folder)
            if settings:
                outputs.append(engine.generate(submits))
                assert sum(stats.num_drafted for stats in engine.stats) > 0
            else:
                outputs.append({})
                for submit in submits:
                    outputs[0] |= engine.generate([submit])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0].values()}) == len(submits), "the adapters change nothing"


def test_cached_prefixes_do_not_cross_adapters(models: Models) -> None:
    """Each request comes alone and after the others of the same prompt: only its own adapter's blocks may be used."""
    with LocalEngine(models.model, lora={}) as engine:
        models.loaded(engine)
        for turn in range(2):
            for submit in models.submits():
                assert engine.generate([submit]) == {submit.request_id: models.expected[submit.request_id]}
                is_first = turn == 0 and submit.request_id.startswith("0-")
                assert engine.last[submit.request_id].num_cached == (0 if is_first else 32)


def test_an_adapter_loaded_again_meets_no_block_of_the_old_one(models: Models) -> None:
    """The same name with other weights, as after an unload and a load."""
    submits = {submit.request_id: submit for submit in models.submits()}
    prompt = list(submits["0-first"].prompt)
    with LocalEngine(models.model, lora={}) as engine:
        models.loaded(engine)
        engine.generate([request("a", prompt, FIRST)])
        retire(engine, FIRST)
        again = AdapterRef(number=7, name="first")
        engine.load_adapter(again, models.adapters[SECOND])
        assert engine.generate([request("b", prompt, again)])["b"] == models.expected["0-second"]
        assert engine.last["b"].num_cached == 0


def test_an_adapter_is_retired_while_its_requests_run(models: Models) -> None:
    """Those that run end with its weights; new ones are refused; it counts as unused only then."""
    submit = next(submit for submit in models.submits() if submit.adapter == FIRST)
    long = request("long", list(submit.prompt), FIRST, num_tokens=120)
    with LocalEngine(models.model, lora={}) as engine:
        models.loaded(engine)
        alone = engine.generate([request("alone", list(submit.prompt), FIRST, num_tokens=120)])["alone"]
        engine.submit([long])
        tokens = [token for delta in engine.deltas() for token in delta.token_ids]
        engine.leader.retire_adapter(FIRST.number)
        engine.submit([request("late", list(submit.prompt), FIRST)])
        seen_unused = []
        late = None
        while len(tokens) < 120:
            seen_unused.append(engine.leader.is_unused(FIRST.number))
            for delta in engine.deltas():
                if delta.request_id == "late":
                    late = delta
                else:
                    tokens += delta.token_ids
        assert late is not None
        assert late.finish_reason == "error"
        assert late.error_kind == "invalid_request"
        assert late.error == "model: the adapter 'first' is not loaded any more"
        assert tokens == alone
        assert not any(seen_unused[:-1])
        wait_unused(engine, FIRST)
        assert engine.generate([request("base", list(submit.prompt), None)])["base"] == models.expected["0-base"]


def test_adapters_come_and_go_under_load(models: Models) -> None:
    """Every request that is accepted gets the tokens of its own weights."""
    submits = models.submits()
    with LocalEngine(models.model, lora={}, max_num_requests=4) as engine:
        models.loaded(engine)
        stop = threading.Event()
        errors: list[BaseException] = []

        def churn() -> None:
            number = 10
            try:
                while not stop.is_set():
                    extra = AdapterRef(number=number, name="extra")
                    engine.load_adapter(extra, models.adapters[FIRST])
                    retire(engine, extra)
                    number += 1
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(4):
                assert engine.generate(submits) == models.expected
        finally:
            stop.set()
            thread.join(30)
        assert not errors


def test_an_aborted_request_leaves_its_adapter_unused(models: Models) -> None:
    submit = models.submits()[1]
    with LocalEngine(models.model, lora={}) as engine:
        models.loaded(engine)
        engine.submit([request("gone", list(submit.prompt), FIRST, num_tokens=400)])
        engine.deltas()
        engine.leader.retire_adapter(FIRST.number)
        engine.abort("gone")
        wait_unused(engine, FIRST)


def test_an_engine_without_the_setting_takes_no_adapter(models: Models) -> None:
    with LocalEngine(models.model) as engine, pytest.raises(ConfigError, match=r"without engine\.lora"):
        models.loaded(engine)


def test_a_rank_above_the_setting_is_refused(models: Models) -> None:
    lora = {"max_lora_rank": 3}
    with (
        LocalEngine(models.model, lora=lora) as engine,
        pytest.raises(ConfigError, match="max_lora_rank allows up to 3"),
    ):
        models.loaded(engine)


def retire(engine: LocalEngine, adapter: AdapterRef) -> None:
    engine.leader.retire_adapter(adapter.number)
    wait_unused(engine, adapter)
    for shard in engine.shards:
        shard.drop_adapter(adapter.number)


def wait_unused(engine: LocalEngine, adapter: AdapterRef) -> None:
    deadline = time.monotonic() + 60
    while not engine.leader.is_unused(adapter.number):
        assert time.monotonic() < deadline
        time.sleep(0.005)
