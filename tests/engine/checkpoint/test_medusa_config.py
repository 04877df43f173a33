"""Configs and tensor names of Medusa heads in their public layouts, as values of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.medusa_config import (
    MEDUSA_FILE,
    MedusaVariant,
    file_names,
    is_medusa,
    medusa_fields,
    tensor_name,
)
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"medusa_num_heads": 2},
            MedusaVariant(num_heads=2, num_blocks=1, has_biases=False, shares_output=False),
        ),
        (
            {"medusa_num_heads": 5, "medusa_num_layers": 3, "num_hidden_layers": 9, "num_heads": 7},
            MedusaVariant(num_heads=5, num_blocks=3, has_biases=False, shares_output=False),
        ),
        (
            {"medusa_num_heads": 5, "num_hidden_layers": 9},  # of the target, not of the heads
            MedusaVariant(num_heads=5, num_blocks=1, has_biases=False, shares_output=False),
        ),
        (
            {"num_heads": 4, "num_hidden_layers": 2, "medusa_fc_bias": True, "original_lm_head": True},
            MedusaVariant(num_heads=4, num_blocks=2, has_biases=True, shares_output=True),
        ),
        (
            {"num_heads": 4, "num_hidden_layers": 2, "medusa_num_layers": 3},
            MedusaVariant(num_heads=4, num_blocks=3, has_biases=False, shares_output=False),
        ),
    ],
)
def test_heads_and_blocks_by_the_keys_of_either_layout(values: dict[str, Any], expected: MedusaVariant) -> None:
    fields = medusa_fields(values)
    assert fields["medusa"] == expected
    assert (fields["positions_per_pass"], fields["architecture"]) == (expected.num_heads, "medusa")


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({}, (0, 0, None)),
        ({"vocab_size": 90, "hidden_size": 8}, (90, 8, None)),
        ({"vocab_size": 90, "truncated_vocab_size": 90}, (90, 0, None)),
        ({"vocab_size": 90, "truncated_vocab_size": 89}, (90, 0, 89)),
        ({"vocab_size": None, "truncated_vocab_size": 5}, (0, 0, None)),
    ],
)
def test_sizes_that_the_target_has_are_left_to_it(values: dict[str, Any], sizes: tuple[int, int, int | None]) -> None:
    fields = medusa_fields({"medusa_num_heads": 2} | values)
    assert (fields["vocab_size"], fields["hidden_size"], fields["draft_vocab_size"]) == sizes


def test_weights_are_counted_by_heads_blocks_and_outputs() -> None:
    own = MedusaVariant(num_heads=3, num_blocks=2, has_biases=True, shares_output=False)
    shared = MedusaVariant(num_heads=3, num_blocks=2, has_biases=True, shares_output=True)
    assert own.num_weights(5, 7) == 3 * 2 * 25 + 3 * 7 * 5
    assert shared.num_weights(5, 7) == 3 * 2 * 25 + 7 * 5


def test_one_head_or_a_malformed_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="medusa_num_heads: 1 given; allowed are whole numbers from 2"):
        medusa_fields({"num_heads": 1})
    for values, key in (({}, "num_heads"), ({"medusa_num_heads": 2, "hidden_size": 0}, "hidden_size")):
        with pytest.raises(ConfigError, match=f"^{key}: "):
            medusa_fields(values)


def test_heads_are_known_by_a_key_or_by_their_type() -> None:
    assert is_medusa({"medusa_num_heads": 2})
    assert is_medusa({"model_type": "medusa"})
    assert not is_medusa({"model_type": "llama", "num_heads": 2})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.1.linear.weight", "blocks.0.layers.1.weight"),
        ("12.0.linear.bias", "blocks.12.layers.0.bias"),
        ("3.2.weight", "lm_heads.3.weight"),
        ("medusa_head.3.2.weight", "lm_heads.3.weight"),
        ("medusa_heads.3.0.linear.weight", "blocks.3.layers.0.weight"),
        ("3.1.weight", "3.1.weight"),  # no output layer: those follow two blocks
        ("blocks.0.layers.1.weight", "blocks.0.layers.1.weight"),
        ("token_map", "token_map"),
    ],
)
def test_tensors_get_the_names_of_one_layout(name: str, expected: str) -> None:
    assert tensor_name(2)(name) == expected


def test_the_file_of_the_authors_comes_first_and_pickles_are_refused(tmp_path: Path) -> None:
    assert file_names(tmp_path) is None
    (tmp_path / "medusa_lm_head.pt").touch()
    (tmp_path / "a.bin").touch()
    with pytest.raises(ConfigError, match=r"are in a\.bin, which would have to be unpickled") as caught:
        file_names(tmp_path)
    assert f"Write {MEDUSA_FILE} once" in str(caught.value)
    (tmp_path / "model.safetensors").touch()
    assert file_names(tmp_path) is None
    (tmp_path / MEDUSA_FILE).touch()
    assert file_names(tmp_path) == ["medusa_lm_head.safetensors"]
