"""Names of proposers, and the settings that each one stands for.

off                no drafts
ngram, shared      prompt lookup in the request; in earlier answers too
eagle, medusa ...  a draft model, by the name that the command gives it
eagle+ngram        lookup first, then the model
...+tree           drafts that branch; lookup and model merged into one tree
...@8              K, or nodes of the tree
...x4              width of the tree
...:goodput        the policy that chooses K; without it K is fixed
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SpeculativeConfig
from engine.errors import ConfigError

_NAME = re.compile(r"(?P<parts>[a-z_0-9-]+(\+[a-z_0-9-]+)*)(@(?P<k>\d+))?(x(?P<width>\d+))?(:(?P<policy>[a-z]+))?")


@dataclass(frozen=True, slots=True)
class Variant:
    """One proposer, or several together."""

    name: str
    """As it was given."""
    settings: SpeculativeConfig
    """Of the engine."""
    draft: str | None
    """Name of the draft among those of the command; None where no model drafts."""

    @property
    def width(self) -> int:
        """Width of draft trees; 1 for chains."""
        return self.settings.tree_width if self.settings.tree == "auto" else 1


def parse_variant(name: str, drafts: Mapping[str, tuple[str, Path]]) -> Variant:
    """The variant of a name.

    Args:
        name: see above.
        drafts: method and folder of each draft, by name.

    Raises:
        ConfigError: the name has another form or an unknown part.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"--variants: {name!r} given; allowed: PART+PART@KxWIDTH:POLICY, such as eagle+ngram+tree@8")
    parts = found["parts"].split("+")
    models = [part for part in parts if part in drafts]
    unknown = set(parts) - set(drafts) - {"off", "ngram", "shared", "tree"}
    if unknown or len(models) > 1 or ("off" in parts and len(parts) > 1):
        allowed = ", ".join(["off", "ngram", "shared", *drafts, "tree"])
        raise ConfigError(f"--variants: {name!r} given; allowed: parts {allowed}, at most one draft")
    has_lookup = "ngram" in parts or "shared" in parts
    settings: dict[str, Any] = {
        "k": int(found["k"] or 5),
        "policy": found["policy"] or "fixed",
        "tree": "auto" if "tree" in parts else "off",
        "lookup": has_lookup,
        "shared_lookup": "all" if "shared" in parts else "off",
    }
    if found["width"]:
        settings["tree_width"] = int(found["width"])
    if "off" in parts:
        settings |= {"method": "none", "policy": "off"}
    elif models:
        method, folder = drafts[models[0]]
        settings |= {"method": method, "draft": str(folder)}
    elif has_lookup:
        settings["method"] = "ngram"
    else:
        raise ConfigError(f"--variants: {name!r} given, which names no proposer")
    return Variant(name, SpeculativeConfig.parse(settings), models[0] if models else None)
