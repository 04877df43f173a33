"""`quantization_config`: what each spelling of a layout means, default by default."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.quantization.config import Quantization, Scheme

WHOLE = 1 << 62


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}, **others}


def gptq(**others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", **others}


def awq(**others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", **others}


def fp8(**others: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **others}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (gptq(), Scheme(bits=4, block=(1, 128), has_zeros=True, zero_offset=1)),
        (gptq(checkpoint_format="gptq_v2"), Scheme(bits=4, block=(1, 128), has_zeros=True)),
        (gptq(format="gptq_v2", bits=8), Scheme(bits=8, block=(1, 128), has_zeros=True)),
        (
            gptq(checkpoint_format="gptq", format="gptq_v2"),
            Scheme(bits=4, block=(1, 128), has_zeros=True, zero_offset=1),
        ),
        (gptq(group_size=-1), Scheme(bits=4, block=(1, WHOLE), has_zeros=True, zero_offset=1)),
        (gptq(group_size=1), Scheme(bits=4, block=(1, 1), has_zeros=True, zero_offset=1)),
        (gptq(dynamic={}, is_marlin_format=False), Scheme(bits=4, block=(1, 128), has_zeros=True, zero_offset=1)),
        (awq(), Scheme(bits=4, block=(1, 128), has_zeros=True)),
        (awq(w_bit=4, q_group_size=64, version="GEMM", zero_point=True), Scheme(bits=4, block=(1, 64), has_zeros=True)),
        (awq(format="gemm", group_size=32, q_group_size=64), Scheme(bits=4, block=(1, 32), has_zeros=True)),
        (fp8(), Scheme(bits=8, is_float=True, block=(WHOLE, WHOLE))),
        (fp8(weight_block_size=[128, 64], fmt="e4m3"), Scheme(bits=8, is_float=True, block=(128, 64))),
        (compressed({}), Scheme(bits=8, block=(WHOLE, WHOLE))),
        (compressed({"group_size": -1}), Scheme(bits=8, block=(1, WHOLE))),
        (compressed({"strategy": "channel", "type": "float"}), Scheme(bits=8, is_float=True, block=(1, WHOLE))),
        (compressed({"group_size": 32, "num_bits": 4}), Scheme(bits=4, block=(1, 32))),
        (compressed({"strategy": "tensor", "symmetric": False}), Scheme(bits=8, block=(WHOLE, WHOLE), has_zeros=True)),
        (compressed({"strategy": "block", "block_structure": [2, 3]}), Scheme(bits=8, block=(2, 3))),
    ],
)
def test_a_layout_by_its_keys_and_by_their_defaults(config: dict[str, Any], scheme: Scheme) -> None:
    quantization = Quantization.parse(config)
    assert quantization is not None
    assert (quantization.method, quantization.schemes) == (config["quant_method"], (scheme,))


def test_an_unquantised_model_has_none() -> None:
    assert Quantization.parse(None) is None


@pytest.mark.parametrize(
    ("config", "quantises_activations"),
    [
        (gptq(), False),
        (awq(), False),
        (fp8(), True),
        (compressed({}), False),
        (compressed({}, kv_cache_scheme={"num_bits": 8}), True),
        (compressed({}, sparsity_config={"format": "dense"}, transform_config={}), False),
        (compressed({}, config_groups={"a": {"weights": {}, "input_activations": {}}, "b": {"weights": {}}}), True),
    ],
)
def test_whether_activations_are_quantised_too(config: dict[str, Any], quantises_activations: bool) -> None:
    quantization = Quantization.parse(config)
    assert quantization is not None
    assert quantization.quantises_activations == quantises_activations


def test_schemes_are_listed_once_and_in_words() -> None:
    groups = {
        "a": {"weights": {"num_bits": 4, "group_size": 32}},
        "b": {"weights": {"num_bits": 4, "group_size": 32}, "format": None},
        "c": {"weights": {"type": "float"}, "format": "float-quantized"},
    }
    quantization = Quantization.parse(compressed({}, config_groups=groups))
    assert quantization is not None
    assert quantization.schemes == (Scheme(bits=4, block=(1, 32)), Scheme(bits=8, is_float=True))
    assert quantization.label == "compressed-tensors 4-bit integers and 8-bit floats"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed({"actorder": "dynamic"}), "config_groups.'a'.weights.actorder: 'dynamic' is not supported"),
        (compressed({"symmetric": 1}), "config_groups.'a'.weights.symmetric: 1 is not supported; allowed: True, False"),
        (compressed({}, config_groups={"a": {"weights": {}, "format": "x"}}), "config_groups.'a'.format: 'x'"),
        (compressed({"strategy": "block", "block_structure": [1, 0]}), "block_structure: 0 is not a whole number"),
        (fp8(expert_dtype="fp4"), "quantization_config.expert_dtype: 'fp4' is not supported; allowed: fp8"),
        (gptq(group_size=True), "group_size: True is not a whole number above 0"),
        (gptq(bits="x" * 200), f"quantization_config.bits: '{'x' * 79} is not supported; allowed: 4, 8; use the"),
    ],
)
def test_refusals_name_the_key_and_are_short(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Quantization.parse(config)
    assert message in str(caught.value)
