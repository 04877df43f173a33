"""Logits against `transformers` in float32, for every family and every mix of rows in one forward.

Promise: within 1e-4, whether a prompt is computed at once, in chunks, token by token, or as verify spans of a batch.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB,
    TokenRange,
    forward_input_of,
    random_cuts,
    reference_logits,
    run_cuts,
    write_model,
)

from engine.checkpoint.store import resolve_model
from engine.model.load import load_model
from engine.model.runner import ModelRunner

TOLERANCE = 1e-4
NUM_BLOCKS = 160


def prompts_of(rng: random.Random, lengths: list[int], vocab: int = VOCAB) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_however_the_rows_are_cut(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, max_shard_size="60KB" if family == "qwen3" else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == (family == "qwen3")
    rng = random.Random(family)
    prompts = prompts_of(rng, [1, 7, 33, 90, 200])
    expected = reference_logits(folder, prompts)
    for block_size, longest in ((16, 512), (1, 1), (4, 6), (16, 60), (32, 40)):
        runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=NUM_BLOCKS * 3, block_size=block_size)
        kept = [0, 1, 2, 3] if block_size > 1 else [0, 1, 2]
        cuts = [random_cuts(rng, len(prompts[index]), longest) for index in kept]
        found = run_cuts(runner, [prompts[index] for index in kept], cuts)
        assert_close(found, [expected[index] for index in kept])


def test_one_batch_mixes_prefill_decode_and_verify(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    rng = random.Random(1)
    prompts = prompts_of(rng, [100, 41, 41, 46, 300, 120])
    expected = reference_logits(folder, prompts)
    # After a first step that fills the caches: a decode, a verify of 1, of 6, and a chunk with and without context.
    cuts = [[99, 1], [40, 1], [39, 2], [40, 6], [200, 100], [1, 119]]
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=NUM_BLOCKS, block_size=8)
    assert_close(run_cuts(runner, prompts, cuts), expected)


def test_reference_paths_agree(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen2")
    prompts = prompts_of(random.Random(2), [30, 12])
    cuts = [[20, 4, 6], [1, 1, 10]]
    slow = load_model(folder, dtype=torch.float32, kernel="reference")
    fast = load_model(folder, dtype=torch.float32)
    found = [run_cuts(ModelRunner(model, num_blocks=40, block_size=4), prompts, cuts) for model in (slow, fast)]
    assert_close(found[0], found[1])


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    import transformers

    folder = write_model(tmp_path, "llama")
    prompts = prompts_of(random.Random(3), [120])
    exact = reference_logits(folder, prompts)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        their_error = (theirs(torch.tensor(prompts)).logits[0].float() - exact).abs().mean()
    ours = run_cuts(ModelRunner(load_model(folder), num_blocks=40, block_size=4), prompts, [[100, 1, 6, 13]])[0]
    assert (ours - exact).abs().mean() < 1.2 * their_error


def test_features_are_the_outputs_of_the_feature_layers(tmp_path: Path) -> None:
    import transformers

    folder = write_model(tmp_path, "qwen3")
    prompt = prompts_of(random.Random(4), [25])[0]
    runner = ModelRunner(load_model(folder, dtype=torch.float32, feature_layers=(0, 1)), num_blocks=10, block_size=4)
    features = runner.forward(forward_input_of([TokenRange(prompt, 0, 25, list(range(7)))], block_size=4)).hidden
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = torch.cat((hidden[1][0], hidden[2][0]), dim=1)
    assert features is not None
    assert torch.allclose(features, expected, atol=TOLERANCE)


def test_steps_reuse_their_memory() -> None:
    """Promise: steps of the same shape reuse memory; without that, this one takes over 70,000 page faults."""
    import resource

    model = load_model(resolve_model("smollm2", progress=False))
    runner = ModelRunner(model, num_blocks=420, block_size=16)
    ranges = [TokenRange(range(401), 400, 401, range(26 * index, 26 * index + 26)) for index in range(16)]
    forward_input = forward_input_of(ranges, block_size=16)
    for _ in range(3):
        runner.forward(forward_input)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    runner.forward(forward_input)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000


def test_no_logit_rows_gives_an_empty_result(tmp_path: Path) -> None:
    import numpy as np
    from msgspec.structs import replace

    folder = write_model(tmp_path, "llama")
    forward_input = forward_input_of([TokenRange([5, 6, 7], 0, 3, [0])], block_size=4)
    result = ModelRunner(load_model(folder), num_blocks=2, block_size=4).forward(
        replace(forward_input, logit_rows=np.zeros(0, dtype=np.int32))
    )
    assert result.require_logits().shape == (0, VOCAB)


def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    folder = resolve_model("smollm2", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        "What is the capital of France?",
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "In 1969 the first people walked on the Moon. " * 8,
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = reference_logits(folder, prompts)
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=NUM_BLOCKS, block_size=16)
    rng = random.Random(5)
    for longest in (512, 20):
        assert_close(
            run_cuts(runner, prompts, [random_cuts(rng, len(prompt), longest) for prompt in prompts]), expected
        )
