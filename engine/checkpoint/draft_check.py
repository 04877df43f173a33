"""Whether a draft's folder belongs to a target's: what its config.json says it was made for, against what there is.

Owns the fingerprint and the comparison. A draft that fails it would never be wrong, only useless: verification keeps
every answer exact. Knows no weights; their shapes are checked where they are read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError


def check_draft(folder: Path, target_folder: Path) -> ModelConfig:
    """The draft's config, once it fits the target.

    Raises:
        ConfigError: naming the field and both values.
    """
    draft, target = ModelConfig.load(folder), ModelConfig.load(target_folder)
    made_for = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("target")
    if made_for is not None:
        if not isinstance(made_for, dict):
            raise ConfigError(f"target: {made_for!r} in {folder / 'config.json'} is not an object")
        expected = _fingerprint(target, target_folder, made_for)
        for name, given in made_for.items():
            if name in expected:
                _compare(f"target.{name}", given, expected[name])
    if draft.shares_embedding or draft.architecture == "eagle":
        _compare("hidden_size", draft.hidden_size, target.hidden_size)
        _compare("vocab_size", draft.vocab_size, target.vocab_size)
    beyond = [layer for layer in draft.feature_layers if layer >= target.num_layers]
    if beyond:
        raise ConfigError(
            f"draft: feature_layers: it reads layers {list(draft.feature_layers)}, the target has 0 to "
            f"{target.num_layers - 1}; use a draft made for this target"
        )
    return draft


def vocabulary_digest(path: Path) -> str:
    """SHA-256 over the tokens of a `tokenizer.json` by id, whatever the file's layout; empty without a file."""
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
    """The target's own values of what a draft may name."""
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
