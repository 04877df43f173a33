"""Rotary embedding against its definition: complex rotation of each pair, and the two kinds of scaling."""

from __future__ import annotations

import math

import pytest
import torch

from engine.checkpoint.model_config import ModelConfig, RopeScaling
from engine.model.rope import Rope, inverse_frequencies


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
