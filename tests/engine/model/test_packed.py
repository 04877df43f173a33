"""Weights that stay quantised on the native kernel, against their dequantised slow twin.

Promise: a product has the bits of the product with the dequantised, rounded weight, for every type, size and number of
rows. So all that holds of the dequantised model holds of this one: rows do not depend on neighbours, and drafting
changes nothing.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import random_rows, write_gguf_model
from native_library import needs_library
from quantised_models import FORMATS, quantise
from safetensors.torch import load_file, save_file
from tiny_gguf import TOKENS
from tiny_models import VOCAB, random_cuts, run_cuts, write_model

from engine.checkpoint.store import gguf_folder
from engine.checkpoint.weights import SCALE_SUFFIX
from engine.gguf.codes import SPLITTERS, Codes, split_blocks, stacked
from engine.model.load import load_model
from engine.model.native.decoder import NativeDecoder
from engine.model.native.matrices import Matrices
from engine.model.runner import ModelRunner

KINDS = {kind.name: kind for kind in SPLITTERS}
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6}
pytestmark = needs_library


def per_row(rows: int, width: int, rng: np.random.Generator) -> Codes:
    """8-bit codes with one scale per row, the lowest code included."""
    codes = rng.integers(-128, 128, (rows, width), dtype=np.int8)
    scales = rng.random((rows, 1), dtype=np.float32) * 0.01
    return Codes(codes, scales, None, bits=8, offset=0, is_half=False)


def weights_of(form: str, rows: int, width: int) -> Codes:
    rng = np.random.default_rng(rows + width)
    if form == "per row":
        return per_row(rows, width, rng)
    if form == "mixed":
        kinds = list(KINDS)
        parts = [random_rows(kinds[row % len(kinds)], 1, width, rng) for row in range(rows)]
        return stacked([split_blocks(raw, KINDS[kinds[row % len(kinds)]]) for row, raw in enumerate(parts)])
    return split_blocks(random_rows(form, rows, width, rng), KINDS[form])


@pytest.mark.parametrize(("rows", "width"), [(1, 256), (33, 512), (64, 768), (100, 256), (49, 1024)])
@pytest.mark.parametrize("form", [*KINDS, "per row", "mixed"])
def test_a_product_has_the_bits_of_the_dequantised_one_and_is_close_to_float64(
    form: str, rows: int, width: int
) -> None:
    codes, matrices = weights_of(form, rows, width), Matrices()
    weight = torch.from_numpy(codes.values()).bfloat16()
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ weight.double().t()
    bound = 2e-6 * (x.double().abs() @ weight.double().abs().t())
    for blocks in (2, 4):
        quantised = matrices.pack_codes(codes, blocks)
        expected = matrices.multiply(matrices.pack(weight, blocks), x)
        assert ((expected.double() - exact).abs() <= bound).all()
        alone = torch.cat([matrices.multiply(quantised, x[row : row + 1]) for row in range(40)])
        assert torch.equal(alone, expected)
        for count in range(1, 41):
            assert torch.equal(matrices.multiply(quantised, x[:count]), expected[:count])


def logits(folder: Path, prompts: list[list[int]], *, packed: bool, threads: int, longest: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load_model(folder, kernel="native", packed=packed)
    finally:
        torch.set_num_threads(before)
    assert isinstance(model, NativeDecoder)
    assert bool(model.packed.num_bytes) == packed
    rng = random.Random(longest)
    runner = ModelRunner(model, num_blocks=80, block_size=16)
    return run_cuts(runner, prompts, [random_cuts(rng, len(prompt), longest) for prompt in prompts])


def check_folder(folder: Path, vocab: int) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in (1, 7, 30, 130)]
    expected = logits(folder, prompts, packed=False, threads=2, longest=200)
    for threads, longest in ((1, 5), (2, 200), (3, 40)):
        found = logits(folder, prompts, packed=True, threads=threads, longest=longest)
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_model_has_the_logits_of_the_dequantised_one(tmp_path: Path, kind: str) -> None:
    architecture = {"Q4_0": "qwen2", "Q6_K": "qwen3"}.get(kind, "llama")
    file = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", kind, architecture=architecture)
    check_folder(gguf_folder(file, tmp_path / "cache"), len(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_read_out_of_the_packed_matrix(tmp_path: Path, tied: bool) -> None:
    file = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", "Q8_0", tied=tied)
    packed, plain = (
        load_model(gguf_folder(file, tmp_path / "cache"), kernel="native", packed=packed) for packed in (True, False)
    )
    assert torch.equal(packed.embedding, plain.embedding)
    prompt = list(range(len(TOKENS)))
    found, expected = (
        run_cuts(ModelRunner(model, num_blocks=4, block_size=16), [prompt], [[len(prompt)]])[0]
        for model in (packed, plain)
    )
    assert torch.equal(found, expected)


def test_an_int8_draft_drafts_the_same_from_its_own_rows(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama", **SIZES)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1) / 127
        tensors[name] = (weight / scale[:, None]).round().to(torch.int8)
        tensors[name + SCALE_SUFFIX] = scale
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    check_folder(target, VOCAB)


DEQUANTISED = [name for name in FORMATS if any(word in name for word in ("act order", "float8", "FP8"))]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in DEQUANTISED])
def test_a_hugging_face_folder_has_the_logits_of_the_dequantised_one(tmp_path: Path, name: str) -> None:
    plain = write_model(tmp_path / "plain", "qwen3", **SIZES)
    folder, _ = quantise(plain, tmp_path / "formats", FORMATS[name])
    check_folder(folder, VOCAB)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_other_formats_are_dequantised(tmp_path: Path, name: str) -> None:
    folder, _ = quantise(write_model(tmp_path / "plain", "llama", **SIZES), tmp_path / "formats", FORMATS[name])
    model = load_model(folder, kernel="native")
    assert isinstance(model, NativeDecoder)
    assert model.packed.num_bytes == 0
