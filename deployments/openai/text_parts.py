"""Text of a message or an item: a string, or a list of text parts, which are joined by newlines.

Owns what a part may hold, its errors and its JSON Schema. Both interfaces read parts here; each names its own types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deployments.openai.fields import value_error

PART_LABELS = ("annotations", "cache_control", "logprobs")
"""Fields of a part that change nothing here. Clients replay them, or send them for other providers."""


@dataclass(frozen=True, slots=True)
class TextParts:
    """The text parts that one interface accepts."""

    types: tuple[str, ...]
    """Values of `type`."""
    is_optional: bool = False
    """Whether null is accepted in place of a text."""
    may_be_empty: bool = False
    """Whether a list without parts is accepted. Its text is empty."""

    def parse(self, value: Any) -> str | None:
        """The text of a value.

        Raises:
            PydanticCustomError: saying which part is wrong.
        """
        if isinstance(value, str) or (value is None and self.is_optional):
            return value
        if not isinstance(value, list):
            raise value_error("must be a string or a list of text parts")
        if not value and not self.may_be_empty:
            raise value_error("must have at least one part")
        return "\n".join(self._text(index, part) for index, part in enumerate(value))

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of what `parse` accepts."""
        part = {
            "type": "object",
            "properties": {"type": {"enum": list(self.types)}, "text": {"type": "string"}}
            | {name: {} for name in PART_LABELS},
            "required": ["type", "text"],
            "additionalProperties": {"type": "null"},
        }
        parts = {"type": "array", "items": part} | ({} if self.may_be_empty else {"minItems": 1})
        return {"anyOf": [{"type": "string"}, parts, *([{"type": "null"}] if self.is_optional else [])]}

    def _text(self, index: int, part: Any) -> str:
        if not isinstance(part, dict):
            raise value_error(f'part {index} must be an object like {{"type": "{self.types[0]}", "text": "..."}}')
        if part.get("type") not in self.types:
            allowed = ", ".join(repr(name) for name in self.types)
            raise value_error(
                f"part {index} has type {str(part.get('type'))[:40]!r}; only {allowed} is supported (no images, audio "
                "or files)"
            )
        unknown = {name for name, field in part.items() if field is not None} - {"type", "text", *PART_LABELS}
        if unknown or not isinstance(part.get("text"), str):
            raise value_error(f"part {index} must have the fields 'type' and 'text' only, and 'text' must be a string")
        text: str = part["text"]
        return text
