"""The page `docs/configuration.md`, made from the settings' own docstrings.

Owns the wording around the settings and nothing of their content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments.settings import AppSettings, AutoscalingSettings, LiveSettings, StoredResponsesSettings
from engine.config import AdaptationConfig, EngineConfig, LoraConfig, Settings, SpeculativeConfig

_INTRO = """# Configuration

Made from the settings' docstrings by `paceline settings --markdown`; a test keeps it current.

A deployment file is a Ray Serve config. `paceline check`, `paceline serve` and the deployment itself check everything
under `args:`. An unknown key or a bad value stops the deployment with a message that names the field, the value and
what is allowed.

```yaml
applications:
  - name: smollm2
    import_path: deployments.app:build
    args:
      engine:
        model: smollm2
        speculative: {draft: smollm2-eagle}
```
"""

SECTIONS: tuple[tuple[str, str, str, type[Settings]], ...] = (
    ("Application", "`args:`", "", AppSettings),
    ("Replicas by load", "`args: autoscaling:`", "autoscaling.", AutoscalingSettings),
    (
        "Stored responses",
        "`args: stored_responses:`. Without this key none are stored; `stored_responses: {}` takes the defaults",
        "stored_responses.",
        StoredResponsesSettings,
    ),
    ("Engine", "`args: engine:`", "engine.", EngineConfig),
    ("Speculative decoding", "`args: engine: speculative:`", "engine.speculative.", SpeculativeConfig),
    (
        "Online adaptation of the draft",
        "`args: engine: speculative: adaptation:`. Off by default, see [speculation.md](speculation.md)",
        "engine.speculative.adaptation.",
        AdaptationConfig,
    ),
    (
        "Adapters",
        "`args: engine: lora:`. Without this key no adapter can be loaded, see [lora.md](lora.md)",
        "engine.lora.",
        LoraConfig,
    ),
    ("Live settings", "`user_config:` of the deployment `Replica`. They change without a restart", "", LiveSettings),
)
"""Title, where the keys stand, prefix of a key's full name, and the model that declares them."""


def settings_markdown() -> str:
    """The page."""
    parts = [_INTRO]
    for title, where, prefix, model in SECTIONS:
        parts.append(f"\n## {title}\n\nUnder {where}.\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n")
        parts += [f"| {' | '.join(row)} |\n" for row in _rows(prefix, model)]
    return "".join(parts)


def settings_lines() -> list[str]:
    """One line per setting for a terminal: name, default, allowed values, meaning."""
    rows = [tuple(cell.strip("`") for cell in row) for *_, prefix, model in SECTIONS for row in _rows(prefix, model)]
    width = max(len(name) for name, *_ in rows)
    return [f"{name:{width}}  {default or '-':12}  {allowed}: {meaning}" for name, default, allowed, meaning in rows]


def _rows(prefix: str, model: type[Settings]) -> Iterator[tuple[str, str, str, str]]:
    schema = model.model_json_schema()
    for name, entry in schema["properties"].items():
        if "$ref" in entry or any("$ref" in option for option in entry.get("anyOf", ())):
            continue  # a section of its own
        is_required = name in schema.get("required", ())
        default = "required" if is_required else _literal(entry.get("default"))
        meaning = " ".join(entry.get("description", "").split()).replace("|", "\\|")
        yield f"`{prefix}{name}`", default, _allowed(entry), meaning


def _literal(value: Any) -> str:
    """A default as YAML writes it; empty where the setting is not given by default."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _allowed(entry: dict[str, Any]) -> str:
    options = [option for option in entry.get("anyOf", (entry,)) if option.get("type") != "null"]
    return ", ".join(_type(option) for option in options)


def _type(option: dict[str, Any]) -> str:
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    bounds = [
        f"{sign} {option[key]:g}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
        if key in option
    ]
    name = {"boolean": "true, false", "array": "list"}.get(option.get("type", ""), option.get("type", ""))
    return " ".join([name, " and ".join(bounds)]).strip()
