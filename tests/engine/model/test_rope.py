"""Rotary embedding against its definition: complex rotation of each pair, and every kind of scaling.

Promise: beyond the original context, logits within 1e-4 of `transformers` in float32. Dynamic scaling and longrope take
the frequencies of the served context, which `transformers` takes for a sequence of that length.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, reference_logits, run_cuts, write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_config import RopeScaling
from engine.model.load import load_model
from engine.model.rope import Rope, inverse_frequencies
from engine.model.runner import ModelRunner


def config_of(head_dim: int = 8, theta: float = 100.0, scaling: RopeScaling | None = None) -> ModelConfig:
    parsed = ModelConfig.parse(
        {
            "model_type": "llama",
            "vocab_size": 9,
            "hidden_size": 2 * head_dim,
            "intermediate_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "rope_theta": theta,
        }
    )
    values = {name: getattr(parsed, name) for name in ModelConfig.__dataclass_fields__}
    return ModelConfig(**(values | {"rope_scaling": scaling}))


def test_pairs_are_rotated_by_position_times_frequency() -> None:
    """RoFormer, eq. 34, as a product of complex numbers; dimensions i and i + head_dim / 2 form a pair."""
    config = config_of()
    positions = torch.tensor([0, 1, 17])
    heads = torch.randn(3, 2, 8)
    found = Rope(config, dtype=torch.float32, device=torch.device("cpu")).at(positions).apply(heads)
    frequencies = 100.0 ** (-torch.arange(4) / 4)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1))


def test_position_zero_changes_nothing_and_dot_products_depend_on_distance_only() -> None:
    rope = Rope(config_of(), dtype=torch.float32, device=torch.device("cpu"))
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    assert torch.equal(rope.at(torch.tensor([0])).apply(q), q)

    def product(q_position: int, k_position: int) -> float:
        turned = [rope.at(torch.tensor([at])).apply(x) for at, x in ((q_position, q), (k_position, k))]
        return float((turned[0] * turned[1]).sum())

    assert product(3, 1) == pytest.approx(product(12, 10), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-5)


def test_the_rotation_has_the_models_dtype() -> None:
    rotation = Rope(config_of(), dtype=torch.bfloat16, device=torch.device("cpu")).at(torch.arange(3))
    assert (rotation.cos.dtype, rotation.sin.dtype) == (torch.bfloat16, torch.bfloat16)
    assert rotation.cos.shape == rotation.sin.shape == (3, 1, 8)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(config_of())
    assert torch.equal(plain, 1.0 / 100.0 ** (torch.arange(4) / 4))
    scaled = inverse_frequencies(config_of(scaling=RopeScaling(kind="linear", factor=4.0)))
    assert torch.equal(scaled, plain / 4)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64)
    plain = inverse_frequencies(config_of(head_dim=32))
    scaled = inverse_frequencies(config_of(head_dim=32, scaling=scaling))
    ratios = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 64 * before / (2 * math.pi)
        share = min(max((turns - 1) / 3, 0), 1)
        assert after == pytest.approx(before * (share + (1 - share) / 8), rel=1e-5)
        ratios.add("kept" if share == 1 else "stretched" if share == 0 else "between")
    assert ratios == {"kept", "stretched", "between"}


FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 5.0, 9.0]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 48,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 48, **FACTORS},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_beyond_the_original_context(tmp_path: Path, name: str) -> None:
    limit = 48 if name == "dynamic" else 192
    scaling = SCALINGS[name] | {"rope_theta": 500.0}
    folder = write_model(tmp_path, "llama", rope_parameters=scaling, max_position_embeddings=limit)
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB) for _ in range(144)]
    expected = reference_logits(folder, [prompt])[0]
    model = load_model(folder, dtype=torch.float32, max_model_len=144)
    assert model.config.max_model_len == 144
    runner = ModelRunner(model, num_blocks=40, block_size=8)
    found = run_cuts(runner, [prompt], [[100, 1, 6, 37]])[0]
    assert (found - expected).abs().max().item() < 1e-4


def test_longrope_in_the_original_context_has_the_short_factors(tmp_path: Path) -> None:
    scaling = SCALINGS["longrope"] | {"rope_theta": 500.0}
    folder = write_model(tmp_path, "llama", rope_parameters=scaling, max_position_embeddings=192)
    prompt = list(range(48))
    expected = reference_logits(folder, [prompt])[0]
    for served, is_equal in ((48, True), (49, False)):
        model = load_model(folder, dtype=torch.float32, max_model_len=served)
        found = run_cuts(ModelRunner(model, num_blocks=40, block_size=8), [prompt], [[48]])[0]
        assert ((found - expected).abs().max().item() < 1e-4) is is_equal


def test_phi3_longrope_on_a_part_of_each_head(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0]}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 40, "max_position_embeddings": 160}
    folder = write_model(tmp_path, "phi3", rope_theta=900.0, sliding_window=None, **changes)
    rng = random.Random(7)
    prompt = [rng.randrange(VOCAB) for _ in range(120)]
    found = run_cuts(
        ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=40, block_size=8), [prompt], [[80, 40]]
    )[0]
    assert (found - reference_logits(folder, [prompt])[0]).abs().max().item() < 1e-4
