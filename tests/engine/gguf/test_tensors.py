"""GGUF files as they are: logits of the dequantised weights for every type and architecture; parts; refusals.

Promise: in float32, within 1e-4 of `transformers` on the weights that the blocks stand for.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_models import DIM, HIDDEN, TYPES, write_gguf_model
from safetensors.torch import load_file
from tiny_gguf import TOKENS
from tiny_models import reference_logits, run_cuts

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import gguf_folder, resolve_model
from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError
from engine.gguf.convert import link
from engine.model.load import load_model
from engine.model.runner import ModelRunner

TOLERANCE = 1e-4


def linked(tmp_path: Path, kind: str = "Q8_0", **options: Any) -> tuple[Path, Path]:
    """The folder of a GGUF file, and the plain folder with the same weights."""
    source = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", kind, **options)
    folder = tmp_path / "linked"
    folder.mkdir()
    link(source, folder)
    return folder, tmp_path / "plain"


def error_of(folder: Path, plain: Path) -> float:
    rng = random.Random(0)
    prompt = [rng.randrange(len(TOKENS)) for _ in range(50)]
    expected = reference_logits(plain, [prompt])[0]
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=20, block_size=8)
    return float((run_cuts(runner, [prompt], [[30, 1, 19]])[0] - expected).abs().max())


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, kind: str) -> None:
    assert error_of(*linked(tmp_path, kind)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    assert error_of(*linked(tmp_path, "Q4_K", architecture=architecture)) < TOLERANCE


def test_a_part_is_the_part_of_the_whole(tmp_path: Path) -> None:
    folder, plain = linked(tmp_path, "Q6_K")
    files, tensors = WeightFiles(folder), load_file(plain / "model.safetensors")
    rng = random.Random(1)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = tensors[name]
        for _ in range(10):
            rows, cols = (slice(*sorted(rng.sample(range(size + 1), 2))) for size in expected.shape)
            part = files.read_float(name, tuple(expected.shape), rows=rows, cols=cols)
            torch.testing.assert_close(part, expected[rows, cols])


def test_a_large_tensor_is_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain = linked(tmp_path, "Q4_0")
    monkeypatch.setattr("engine.checkpoint.weights._CHUNK_ELEMENTS", HIDDEN * 7)
    name = "model.layers.0.self_attn.k_proj.weight"
    found = WeightFiles(folder).read_float(name, (2 * DIM, HIDDEN), dtype=torch.bfloat16)
    assert torch.equal(found, load_file(plain / "model.safetensors")[name].bfloat16())


def test_the_load_says_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = linked(tmp_path, "Q5_1")
    with caplog.at_level("INFO"):
        load_model(folder, dtype=torch.float32)
    assert "quantised weights (GGUF Q5_1), 0.001 GB in the files, are dequantised once to float32: 0." in caplog.text


def test_scaled_frequencies_are_read(tmp_path: Path) -> None:
    factors = [1.0] * 16 + [8.0] * 16
    folder, plain = linked(tmp_path, rope_freqs=factors)
    scaling = ModelConfig.load(folder).rope_scaling
    assert scaling is not None
    assert scaling.long_factors == scaling.short_factors == tuple(factors)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.model.rotary_emb.inv_freq /= torch.tensor(factors)
    prompt = list(range(len(TOKENS)))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=20, block_size=8)
    assert (run_cuts(runner, [prompt], [[len(prompt)]])[0] - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_by_a_factor_is_read(tmp_path: Path, kind: str) -> None:
    values: dict[str, Any] = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
    folder, _ = linked(tmp_path, **values, rope__scaling__original_context_length=128)
    config = ModelConfig.load(folder)
    scaling = config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, config.max_model_len) == (kind, 4.0, 512)
    assert scaling.original_max_len == (128 if kind == "yarn" else 8192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_scale": 2.0}, r"llama\.logit_scale = 2\.0 is not supported"),
        ({"expert_count": 8}, r"llama\.expert_count = 8 is not supported; allowed: 0"),
        ({"rope__dimension_count": 32}, r"rope\.dimension_count = 32 is not supported; allowed: 64"),
        (
            {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0},
            r"scaling\.type = 'longrope'; allowed: none",
        ),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0, "rope__scaling__attn_factor": 1.5},
            r"llama\.rope\.scaling\.attn_factor is not supported; allowed: 1\.0",
        ),
        ({"rope_freqs": [1.0] * 5}, r"rope_freqs\.weight has shape \[5\]"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        linked(tmp_path, **options)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    source = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", "Q8_0")
    content = source.read_bytes()
    at = content.index(b"output.weight") + len(b"output.weight") + 4 + 2 * 8
    assert content[at] == 8
    for number, (kind, label) in enumerate(((b"\x0a", "Q2_K"), (b"\xc8", "200"))):
        source.write_bytes(content[:at] + kind + content[at + 1 :])
        with pytest.raises(
            ConfigError, match=rf"tensor output\.weight is of type {label}; allowed: F32, F16, BF16, Q4_0"
        ):
            load_model(gguf_folder(source, tmp_path / f"cache {number}"))


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    source = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", "Q8_0")
    content = source.read_bytes()
    source.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(ConfigError, match="is cut short: its tensors need"):
        load_model(gguf_folder(source, tmp_path / "cache"))


def test_a_file_is_resolved_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    source = write_gguf_model(tmp_path / "a.gguf", tmp_path / "plain", "Q8_0")
    folder = resolve_model(str(source))
    assert resolve_model(str(source)) == folder
    assert resolve_model(str(folder)) == folder
    assert load_model(folder).config.num_layers == 2
    write_gguf_model(source, tmp_path / "plain", "Q4_0")
    assert resolve_model(str(source)) != folder


def test_a_missing_file_a_split_file_and_a_folder_around_a_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.gguf"):
        resolve_model(str(tmp_path / "gone.gguf"))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"give the file itself: --model .*some\.gguf"):
        resolve_model(str(tmp_path))
