"""The meaning of `quantization_config` in a config.json: how the weights of a checkpoint are stored.

Owns the list of supported formats and the refusals. A layout that is not supported raises an error that names it and
the remedy. Knows no tensors: `engine.quantization.dequantize` does the arithmetic. Formats:
https://github.com/vllm-project/compressed-tensors, https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/casper-hansen/AutoAWQ, and `FineGrainedFP8Config` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ConfigError

Method = Literal["compressed-tensors", "fp8", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("compressed-tensors", "fp8", "gptq", "awq")
PACKED_BITS = (4, 8)
"""Widths of integers that are packed into int32."""
_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_REMEDY = "use the unquantised checkpoint, or one quantised as compressed-tensors, AWQ, GPTQ, FP8 or GGUF"
_WHOLE = 1 << 62
"""Block side that is longer than any dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How some of the weights are stored."""

    bits: int
    """Bits of one element."""
    is_float: bool = False
    """Whether the elements are float8_e4m3fn; otherwise they are integers."""
    block: tuple[int, int] = (_WHOLE, _WHOLE)
    """Rows and columns that share a scale; clipped to the shape of the tensor."""
    has_zeros: bool = False
    """Whether each scale has a zero point."""
    zero_offset: int = 0
    """GPTQ: added to a stored zero point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantisation of one checkpoint."""

    method: Method
    schemes: tuple[Scheme, ...]
    """Schemes that occur. The tensors of a layer tell which of them it has."""
    quantises_activations: bool = False
    """Whether the format also asks for quantised activations or a quantised KV cache. They are not quantised here."""

    @classmethod
    def parse(cls, values: Any) -> Quantization | None:
        """Build from the value of `quantization_config`; None for an unquantised model.

        Raises:
            ConfigError: the method or its layout is not supported, or a key is malformed.
        """
        if values is None:
            return None
        if not isinstance(values, dict):
            raise ConfigError(f"quantization_config: {values!r} is not an object")
        method = values.get("quant_method")
        parse = {"compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq}.get(str(method))
        if parse is None:
            raise ConfigError(
                f"quantization_config.quant_method: {method!r} is not supported; allowed: {', '.join(METHODS)}; "
                f"{_REMEDY}"
            )
        return parse(values)

    @property
    def label(self) -> str:
        """The format in words, such as `compressed-tensors 4-bit integers`."""
        kinds = sorted({f"{scheme.bits}-bit {'floats' if scheme.is_float else 'integers'}" for scheme in self.schemes})
        return f"{self.method} {' and '.join(kinds)}"


def _compressed(values: dict[str, Any]) -> Quantization:
    name = "quantization_config"
    _one_of(f"{name}.format", values.get("format", "dense"), _FORMATS)
    _one_of(f"{name}.quantization_status", values.get("quantization_status", "compressed"), ("compressed",))
    for key in ("sparsity_config", "transform_config"):
        extra = values.get(key)
        if extra and not (isinstance(extra, dict) and extra.get("format", "other") == "dense"):
            raise ConfigError(f"{name}.{key}: {_short(extra)} is not supported; {_REMEDY}")
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{name}.config_groups: {_short(groups)} is not an object with at least one group")
    schemes: list[Scheme] = []
    quantises_activations = values.get("kv_cache_scheme") is not None
    for key, group in groups.items():
        where = f"{name}.config_groups.{_short(key, 40)}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ConfigError(f"{where}.weights: not an object; groups without quantised weights are not supported")
        _one_of(f"{where}.format", group.get("format") or "dense", _FORMATS)
        scheme = _compressed_scheme(f"{where}.weights", group["weights"])
        if scheme not in schemes:
            schemes.append(scheme)
        quantises_activations |= group.get("input_activations") is not None
    return Quantization(
        method="compressed-tensors", schemes=tuple(schemes), quantises_activations=quantises_activations
    )


def _compressed_scheme(where: str, weights: dict[str, Any]) -> Scheme:
    kind = _one_of(f"{where}.type", weights.get("type", "int"), ("int", "float"))
    bits = _one_of(f"{where}.num_bits", weights.get("num_bits", 8), (8,) if kind == "float" else PACKED_BITS)
    symmetric = _one_of(f"{where}.symmetric", weights.get("symmetric", True), (True, False))
    if weights.get("actorder") == "dynamic":
        raise ConfigError(f"{where}.actorder: 'dynamic' is not supported; {_REMEDY}")
    group_size = weights.get("group_size")
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = weights.get("strategy") or default
    _one_of(f"{where}.strategy", strategy, ("tensor", "channel", "group", "block"))
    block = (_WHOLE, _WHOLE)
    if strategy == "channel":
        block = (1, _WHOLE)
    elif strategy == "group":
        block = (1, _positive(f"{where}.group_size", group_size))
    elif strategy == "block":
        block = _block(f"{where}.block_structure", weights.get("block_structure"))
    return Scheme(bits=bits, is_float=kind == "float", block=block, has_zeros=not symmetric)


def _fp8(values: dict[str, Any]) -> Quantization:
    name = "quantization_config"
    activations = values.get("activation_scheme", "dynamic")
    _one_of(f"{name}.activation_scheme", activations, ("dynamic", "static"))
    _one_of(f"{name}.fmt", values.get("fmt", "e4m3"), ("e4m3",))
    _one_of(f"{name}.scale_fmt", values.get("scale_fmt") or "float", ("float",))
    _one_of(f"{name}.expert_dtype", values.get("expert_dtype") or "fp8", ("fp8",))
    sides = values.get("weight_block_size")
    block = (_WHOLE, _WHOLE) if sides is None else _block(f"{name}.weight_block_size", sides)
    return Quantization(method="fp8", schemes=(Scheme(bits=8, is_float=True, block=block),), quantises_activations=True)


def _gptq(values: dict[str, Any]) -> Quantization:
    name = "quantization_config"
    layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    _one_of(f"{name}.checkpoint_format", layout, ("gptq", "gptq_v2"))
    _one_of(f"{name}.is_marlin_format", values.get("is_marlin_format", False), (False,))
    if values.get("dynamic"):
        raise ConfigError(f"{name}.dynamic: settings per module are not supported; {_REMEDY}")
    return Quantization(method="gptq", schemes=(_grouped(values, PACKED_BITS, zero_offset=layout == "gptq"),))


def _awq(values: dict[str, Any]) -> Quantization:
    name = "quantization_config"
    version = values.get("version") or values.get("format") or "gemm"
    _one_of(f"{name}.version", version.lower() if isinstance(version, str) else version, ("gemm",))
    _one_of(f"{name}.zero_point", values.get("zero_point", True), (True,))
    return Quantization(method="awq", schemes=(_grouped(values, (4,), zero_offset=False),))


def _grouped(values: dict[str, Any], widths: tuple[int, ...], *, zero_offset: bool) -> Scheme:
    name = "quantization_config"
    bits = _one_of(f"{name}.bits", values.get("bits", values.get("w_bit", 4)), widths)
    group_size = values.get("group_size", values.get("q_group_size", 128))
    columns = _WHOLE if group_size == -1 else _positive(f"{name}.group_size", group_size)
    return Scheme(bits=bits, block=(1, columns), has_zeros=True, zero_offset=int(zero_offset))


def _one_of(name: str, given: Any, allowed: tuple[Any, ...]) -> Any:
    """The value, if it is an allowed one.

    Raises:
        ConfigError: it is not.
    """
    if not any(type(given) is type(value) and given == value for value in allowed):
        words = ", ".join(str(value) for value in allowed)
        raise ConfigError(f"{name}: {_short(given)} is not supported; allowed: {words}; {_REMEDY}")
    return given


def _positive(name: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ConfigError(f"{name}: {_short(given)} is not a whole number above 0")
    return given


def _block(name: str, given: Any) -> tuple[int, int]:
    if not isinstance(given, list) or len(given) != 2:
        raise ConfigError(f"{name}: {_short(given)} is not a list of two whole numbers above 0")
    return _positive(name, given[0]), _positive(name, given[1])


def _short(given: Any, length: int = 80) -> str:
    return repr(given)[:length]
