"""`adapter_config.json` of a LoRA adapter in the layout of `peft`.

Owns the meaning of its keys: rank and scale of each module, and which modules are adapted. A key that would change the
result and is not computed raises an error that names it. Knows nothing of tensors. Imports no torch.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from engine.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERN_CHARS, MAX_PATTERNS = 2000, 2048
MATCH_TIMEOUT_S = 5.0
"""Seconds that all regular expressions of one file may take together."""
ALL_LINEAR = "all-linear"

_NO_EFFECT = frozenset({
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
})  # fmt: skip
"""Keys that change nothing in a text decoder once the tensors exist."""
_READ = frozenset({
    "alpha_pattern",
    "exclude_modules",
    "init_lora_weights",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
    "bias",
})  # fmt: skip
_KNOWN_REFUSALS = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save, which replaces whole modules",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapters of parameters such as experts",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "transposed weights",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is. Others train against a changed base model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How one adapter was made."""

    rank: int
    """Rank of modules that `rank_pattern` does not name."""
    alpha: float
    """Numerator of the scale of modules that `alpha_pattern` does not name."""
    is_rank_stabilised: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)."""
    target_modules: str | tuple[str, ...]
    """Ends of module names, or a regular expression of whole names, or `all-linear`."""
    exclude_modules: str | tuple[str, ...]
    """Of the same form; empty excludes nothing."""
    layers: frozenset[int] | None
    """Layers that a list of target modules is limited to; None: all."""
    rank_pattern: tuple[tuple[str, int], ...]
    """Regular expressions of the ends of module names, and their ranks. The first match counts."""
    alpha_pattern: tuple[tuple[str, float], ...]

    @classmethod
    def load(cls, folder: Path) -> AdapterConfig:
        """Read the file of a folder.

        Raises:
            ConfigError: the file is missing or damaged, or asks for what is not computed. Names the key.
        """
        values = _read(folder / CONFIG_FILE)
        _refuse_unsupported(values)
        alpha = values.get("lora_alpha", 8)
        return cls(
            rank=_rank("r", values.get("r", 8)),
            alpha=_number("lora_alpha", alpha),
            is_rank_stabilised=_flag("use_rslora", values.get("use_rslora")),
            target_modules=_modules("target_modules", values.get("target_modules")),
            exclude_modules=_modules("exclude_modules", values.get("exclude_modules")),
            layers=_layers(values.get("layers_to_transform")),
            rank_pattern=tuple((key, _rank("rank_pattern", rank)) for key, rank in _pattern(values, "rank_pattern")),
            alpha_pattern=tuple((key, _number("alpha_pattern", a)) for key, a in _pattern(values, "alpha_pattern")),
        )


@dataclass(frozen=True, slots=True)
class ModuleScale:
    """What the configuration says of one adapted module."""

    rank: int
    scale: float
    """Factor of the product of both matrices."""


def scales(config: AdapterConfig, modules: list[str]) -> dict[str, ModuleScale]:
    """Rank and scale of every module that the configuration targets.

    Args:
        config: of the adapter.
        modules: full names of the modules that can be adapted, such as `model.layers.0.self_attn.q_proj`.

    Raises:
        ConfigError: a regular expression is wrong or takes too long.
    """
    matcher = _Matcher()
    found = {}
    for name in modules:
        if config.layers is not None and isinstance(config.target_modules, tuple) and _layer(name) not in config.layers:
            continue
        if not matcher.is_named(config.target_modules, name) or matcher.is_named(config.exclude_modules, name):
            continue
        rank = matcher.first(config.rank_pattern, name, config.rank)
        alpha = matcher.first(config.alpha_pattern, name, config.alpha)
        found[name] = ModuleScale(rank, alpha / (math.sqrt(rank) if config.is_rank_stabilised else rank))
    return found


class _Matcher:
    """Matches names against the patterns of one file, in bounded time: the file may come from anybody."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + MATCH_TIMEOUT_S

    def is_named(self, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, tuple):
            return any(module == name or module.endswith(f".{name}") for name in names)
        return names == ALL_LINEAR or (names != "" and self._matches(names, module))

    def first(self, patterns: tuple[tuple[str, Any], ...], module: str, default: Any) -> Any:
        """The value of the first pattern that matches the end of a module's name."""
        return next((value for key, value in patterns if self._matches(rf"(.*\.)?({key})", module)), default)

    def _matches(self, pattern: str, module: str) -> bool:
        left_s = self._end_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            return regex.fullmatch(pattern, module, timeout=left_s) is not None
        except TimeoutError:
            raise ConfigError(f"lora: the patterns in {CONFIG_FILE} take over {MATCH_TIMEOUT_S:g} s to match") from None
        except (regex.error, RecursionError, MemoryError, OverflowError) as error:
            raise ConfigError(f"lora: {pattern[:200]!r} is no regular expression: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"lora: {path} has more than {MAX_CONFIG_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"lora: cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"lora: {path} does not hold a JSON object")
    return values


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise ConfigError(f"lora: peft_type {values.get('peft_type')!r} is not supported; allowed: 'LORA'")
    if values.get("bias", "none") != "none":
        raise ConfigError(f"lora: bias {values['bias']!r} is not supported; allowed: 'none'")
    for key, label in _KNOWN_REFUSALS.items():
        if values.get(key):
            raise ConfigError(f"lora: {key}: {label} is not supported; train the adapter without it")
    start = values.get("init_lora_weights", True)
    if not any(start is allowed or (isinstance(start, str) and start == allowed) for allowed in _PLAIN_STARTS):
        raise ConfigError(
            f"lora: init_lora_weights {start!r} may have changed the base model; convert the adapter when it is saved, "
            "as `peft` describes, or train it with the default"
        )
    for key, value in values.items():
        if key not in _NO_EFFECT | _READ | _KNOWN_REFUSALS.keys() and value not in (None, False, "", [], {}):
            raise ConfigError(f"lora: {key}: {str(value)[:200]} is not supported; leave it at its default")


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"lora: {key}: {value!r} is no whole number above 0")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"lora: {key}: {value!r} is no finite number")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if value not in (None, True, False):
        raise ConfigError(f"lora: {key}: {value!r} is neither true nor false")
    return bool(value)


def _layers(value: Any) -> frozenset[int] | None:
    layers = [value] if type(value) is int else value or None
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ConfigError(f"lora: layers_to_transform: {value!r} is neither a layer number nor a list of them")
    return frozenset(layers)


def _layer(module: str) -> int:
    """Number of the layer in a name such as `model.layers.0.self_attn.q_proj`."""
    return int(module.split(".")[2])


def _modules(key: str, value: Any) -> str | tuple[str, ...]:
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"lora: {key}: {value!r} is neither a regular expression nor a list of names")
    if any(len(name) > MAX_PATTERN_CHARS for name in names):
        raise ConfigError(f"lora: {key}: an entry has more than {MAX_PATTERN_CHARS} characters")
    return value if isinstance(value, str) else tuple(names)


def _pattern(values: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    given = values.get(key) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise ConfigError(f"lora: {key}: an object of at most {MAX_PATTERNS} patterns is allowed")
    if any(len(pattern) > MAX_PATTERN_CHARS for pattern in given):
        raise ConfigError(f"lora: {key}: a pattern has more than {MAX_PATTERN_CHARS} characters")
    return list(given.items())
