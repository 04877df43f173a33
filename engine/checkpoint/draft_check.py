"""Checks that a draft's model folder fits a target's.

Owns the fingerprint of a target, and its comparison with the one in the draft's config.json. A draft that does not fit
would never give wrong output, since drafts are verified, but it would not help either. Knows nothing of weights: their
shapes are checked when they are read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.public_draft import default_feature_layers
from engine.errors import ConfigError


def check_draft(folder: Path, target_folder: Path) -> ModelConfig:
    """Check a draft against its target.

    Args:
        folder: model folder of the draft.
        target_folder: model folder of the target.

    Returns:
        The draft's config, with what it leaves to the target: the feature layers of an EAGLE-3 head, and its longest
        sequence, since heads are trained on short texts and used on those of their target; for Medusa heads, all sizes.

    Raises:
        ConfigError: the draft does not fit the target. Names the field and both values.
    """
    draft, target = ModelConfig.load(folder), ModelConfig.load(target_folder)
    if target.medusa is not None:
        raise ConfigError(f"model: {target_folder} holds Medusa heads, which are a draft and no model")
    if draft.medusa is not None:
        draft = fit_medusa(draft, target)
    if draft.is_published:
        draft = replace(
            draft,
            feature_layers=draft.feature_layers or default_feature_layers(target.num_layers),
            max_model_len=max(draft.max_model_len, target.max_model_len),
        )
    made_for = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("target")
    if made_for is not None:
        if not isinstance(made_for, dict):
            raise ConfigError(f"target: {made_for!r} in {folder / 'config.json'} is not an object")
        expected = _fingerprint(target, target_folder, made_for)
        for name, given in made_for.items():
            if name in expected:
                _compare(f"target.{name}", given, expected[name])
    if draft.eagle3 is not None:
        _compare("target_hidden_size", draft.eagle3.feature_size, target.hidden_size)
        _compare("vocab_size", draft.vocab_size, target.vocab_size)
    elif draft.shares_embedding or draft.architecture == "eagle":
        _compare("hidden_size", draft.hidden_size, target.hidden_size)
        _compare("vocab_size", draft.vocab_size, target.vocab_size)
    missing = [layer for layer in draft.feature_layers if layer >= target.num_layers]
    if missing:
        raise ConfigError(
            f"draft: feature_layers: it reads layers {list(draft.feature_layers)}, the target has 0 to "
            f"{target.num_layers - 1}; use a draft made for this target"
        )
    return draft


def fit_medusa(draft: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The config of Medusa heads with the sizes of their target: they read its last layer, at any length of text.

    Raises:
        ConfigError: the heads were made for other sizes; names the field and both values.
    """
    for name in ("hidden_size", "vocab_size"):
        _compare(name, getattr(draft, name) or getattr(target, name), getattr(target, name))
    return replace(
        draft,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        feature_layers=(target.num_layers - 1,),
        max_model_len=target.max_model_len,
    )


def vocabulary_digest(path: Path) -> str:
    """SHA-256 of the tokens of a `tokenizer.json`, sorted by id; empty when there is no file.

    Raises:
        ConfigError: the file is not a tokenizer.
    """
    if not path.exists():
        return ""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        vocab = given["model"]["vocab"]
        is_list = isinstance(vocab, list)
        tokens = dict(enumerate(item[0] for item in vocab)) if is_list else {i: t for t, i in vocab.items()}
        tokens.update({item["id"]: item["content"] for item in given.get("added_tokens", [])})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not a tokenizer: {error!r}") from None
    return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()


def _fingerprint(target: ModelConfig, folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The target's values of the fields that a draft's fingerprint can contain."""
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }
    if "vocabulary_sha256" in wanted:
        values["vocabulary_sha256"] = vocabulary_digest(folder / "tokenizer.json")
    return values


def _compare(name: str, given: Any, expected: Any) -> None:
    if given != expected:
        raise ConfigError(
            f"draft: {name}: the draft was made for {given!r}, the target has {expected!r}; "
            "use a draft made for this target"
        )
