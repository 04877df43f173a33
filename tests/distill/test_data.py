"""Shards: whole or absent, read back as written, resumed where they were left; the generator tells the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from distill_fakes import STOP, VOCAB, jobs, open_model, open_target, write_shards, write_target
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_library
from tiny_models import TextDelta, plan_of, write_model

from distill.data import (
    Document,
    Shard,
    ShardWriter,
    batches,
    collate,
    length_batches,
    row_spans,
    shard_paths,
    token_mass,
)
from distill.decoder import FrozenTarget
from distill.generate import Generator, Job, Segment
from distill.likeliest import likeliest
from engine.model.load import Model, load_model
from engine.model.runner import ModelRunner


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return open_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def model(target: FrozenTarget) -> Model:
    return open_model(target.folder)


def document(length: int, *, first: int = 0) -> Document:
    """Token i of the document is first + i; features repeat the token."""
    tokens = np.arange(first, first + length, dtype=np.uint16)
    return Document(
        kind="counting",
        tokens=tokens,
        written=(np.arange(length) >= 3).astype(np.uint8),
        features=np.broadcast_to(tokens[:, None, None], (length, 2, 4)).copy(),
        top_ids=np.stack([tokens + 1, tokens + 2], axis=1).astype(np.uint16),
        top_logprobs=np.full((length, 2), -0.7, np.float16),
    )


@pytest.mark.parametrize("max_rows", [5, 256])
def test_generator_records_what_the_target_computes(target: FrozenTarget, model: Model, max_rows: int) -> None:
    generator = Generator(model, num_slots=3, max_len=48, stop_token=STOP, seed=0, num_top=8, max_rows=max_rows)
    found = list(generator.run(iter([*jobs(5, temperature=0.0), *jobs(4, seed=1, prompt_len=9)])))
    assert len(found) == 9
    twin, tapped = transformers.LlamaForCausalLM.from_pretrained(target.folder, dtype=torch.float32), []
    for layer in twin.model.layers:
        layer.register_forward_hook(lambda layer, args, out: tapped.append(out[0]))
    for doc in found:
        tapped.clear()
        with torch.inference_mode():
            logits = twin(torch.from_numpy(doc.tokens.astype(np.int64))[None]).logits[0]
        distribution = logits.log_softmax(-1).topk(8)
        features = torch.from_numpy(doc.features).view(torch.bfloat16).float()
        torch.testing.assert_close(features, torch.stack(tapped, 1), rtol=0.01, atol=0.01)
        np.testing.assert_allclose(doc.top_logprobs, distribution.values.numpy(), atol=0.02)
        assert (doc.top_ids[:, 0] == distribution.indices[:, 0].numpy()).mean() > 0.95


@needs_library
def test_generator_keeps_what_serving_computes(tmp_path: Path) -> None:
    """The native forward gives a row the same result whatever is beside it, so all that is kept must be equal to it."""
    folder = write_model(tmp_path, "llama", head_dim=64, hidden_size=96, intermediate_size=160, num_attention_heads=6)
    model = load_model(folder, kernel="native", feature_layers=(0, 1))
    generator = Generator(model, num_slots=3, max_len=70, stop_token=STOP, seed=0, num_top=8, max_rows=20)
    documents = list(generator.run(iter([*jobs(4), *jobs(3, seed=1, prompt_len=33)])))
    assert len(documents) == 7
    for doc in documents:
        ids, runner = doc.tokens.tolist(), ModelRunner(model, num_blocks=8, block_size=16)
        result = runner.forward(plan_of([TextDelta(ids, 0, len(ids), range(1, 8))], block_size=16))
        assert result.hidden is not None
        np.testing.assert_array_equal(doc.features, result.hidden.view(len(ids), 2, 96).view(torch.uint16).numpy())
        distribution = result.require_logits().log_softmax(-1).topk(8)
        np.testing.assert_allclose(doc.top_logprobs, distribution.values.numpy(), rtol=1e-3, atol=1e-3)


def test_read_only_prompts_are_kept_without_their_last_token(model: Model) -> None:
    generator = Generator(model, num_slots=2, max_len=48, stop_token=STOP, seed=0, num_top=8, max_rows=10)
    prompts = [tuple(range(3, 3 + length)) for length in (48, 20, 30)]
    found = list(generator.run(Job("text", prompt, (), own=True) for prompt in prompts))
    assert {tuple(doc.tokens.tolist()) for doc in found} == {prompt[:-1] for prompt in prompts}
    assert all(doc.written.all() and (doc.top_logprobs < 0).all() for doc in found)


@given(
    vocab=st.integers(20, 9000),
    count=st.integers(1, 80),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 9),
)
def test_likeliest_is_exact(vocab: int, count: int, spread: float, seed: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    distribution = logits.log_softmax(-1)
    values, ids = likeliest(logits, count)
    expected = distribution.topk(min(count, vocab)).values
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distribution.gather(1, ids), expected, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_greedy_answers_follow_the_best_token(model: Model) -> None:
    generator = Generator(model, num_slots=2, max_len=48, stop_token=STOP, seed=0, num_top=8)
    for doc in generator.run(iter(jobs(4, temperature=0.0))):
        chosen = np.flatnonzero(doc.written)
        assert (doc.tokens[chosen] == doc.top_ids[chosen - 1, 0]).all()


def test_glue_between_turns_is_given_not_written(model: Model) -> None:
    glue = (7, 8, 9)
    generator = Generator(model, num_slots=1, max_len=64, stop_token=STOP, seed=0, num_top=8)
    (doc,) = generator.run(iter([Job("two turns", (5, 6), (Segment(1.0, 10, glue), Segment(0.0, 10)))]))
    text = doc.tokens.tolist()
    at = text.index(STOP, 2) + 1
    assert tuple(text[at : at + 3]) == glue
    assert not doc.written[at : at + 3].any()
    assert doc.written[at + 3]


def test_shards_are_read_back_and_numbered_on(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", {"note": 1}, shard_tokens=50)
    for number in range(5):
        writer.add(document(20, first=100 * number))
    writer.flush()
    again = ShardWriter(tmp_path, "s", {"note": 1}, shard_tokens=50)
    again.add(document(20, first=900))
    again.flush()
    paths = shard_paths([tmp_path])
    assert [path.name for path in paths] == ["s-00000", "s-00001", "s-00002"]
    starts = [int(Shard.open(path).tokens[begin]) for path in paths for begin in Shard.open(path).doc_starts[:-1]]
    assert starts == [0, 100, 200, 300, 400, 900]


def test_a_killed_writer_leaves_no_shard(tmp_path: Path) -> None:
    (tmp_path / ".s-00000.partial").mkdir()
    (tmp_path / ".s-00000.partial" / "meta.json").write_text("{}")
    assert shard_paths([tmp_path]) == []
    writer = ShardWriter(tmp_path, "s", {}, shard_tokens=10)
    writer.add(document(20))
    assert [path.name for path in shard_paths([tmp_path])] == ["s-00000"]


def test_weights_mark_what_the_target_chose(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", {}, shard_tokens=10)
    writer.add(document(20))
    (shard,) = map(Shard.open, shard_paths([tmp_path]))
    batch = collate([(shard, 0, 20)], 20, 0.25)
    # Tokens 3.. were chosen, so the laws at positions 2.. count fully; the last position has no successor.
    assert batch.weight[0].tolist() == [0.25] * 2 + [1.0] * 17 + [0.0]
    assert batch.tokens[0].tolist() == list(range(20))
    assert batch.top_ids[0, :, 0].tolist() == list(range(1, 21))


def test_long_documents_are_cut_and_all_of_them_used(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", {}, shard_tokens=10)
    writer.add(document(100))
    (shard,) = map(Shard.open, shard_paths([tmp_path]))
    assert row_spans(shard, 32) == [(0, 32), (32, 64), (64, 96)]


@pytest.mark.parametrize("seed", range(5))
def test_length_batches_hold_every_row_once_within_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 400, 300).tolist()
    found = length_batches(lengths, 1000, rng)
    assert sorted(i for rows in found for i in rows) == list(range(300))
    assert all(len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= 1000 for rows in found)


def test_resumed_batches_continue_the_pass(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", {}, shard_tokens=40)
    for number in range(12):
        writer.add(document(40, first=1000 * number))

    def firsts(start: int, count: int) -> list[tuple[int, int]]:
        source = batches([tmp_path], row_len=40, batch_tokens=40, seed=3, prompt_weight=0.1, start=start, group=4)
        return [(done, int(batch.tokens[0, 0])) for (done, batch), _ in zip(source, range(count), strict=False)]

    whole = firsts(0, 24)
    assert sorted(first for _, first in whole[:12]) == [1000 * n for n in range(12)]
    later = next(place for place, (done, _) in enumerate(whole) if done == 4)
    assert firsts(4, 24 - later) == whole[later:]


def test_a_shard_that_appears_is_read_next(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", {}, shard_tokens=40)
    for number in range(4):
        writer.add(document(40, first=1000 * number))
    source = batches([tmp_path], row_len=40, batch_tokens=40, seed=3, prompt_weight=0.1, group=2)
    seen = [int(next(source)[1].tokens[0, 0]) for _ in range(6)]
    assert sorted(seen[:4]) == [0, 1000, 2000, 3000]
    writer.add(document(40, first=9000))
    assert int(next(source)[1].tokens[0, 0]) == 9000


def test_no_shards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no finished shards"):
        next(batches([tmp_path], row_len=8, batch_tokens=8, seed=0, prompt_weight=0.0))


def test_token_mass_sums_the_laws(target: FrozenTarget, tmp_path: Path) -> None:
    paths = write_shards(target, tmp_path, count=20, shard_tokens=400)
    mass = token_mass(paths, VOCAB)
    written = sum(int(Shard.open(path).written.sum()) for path in paths)
    assert 0.8 * written < float(mass.sum()) <= 1.01 * written
