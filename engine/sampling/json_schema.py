"""Which JSON schemas can be promised: those whose every keyword the grammar compiler enforces.

Owns the list of keywords and of the combinations in which they hold together. The compiler ignores what it does not
know, which would give answers that do not match; here such a schema is refused with the place and the keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator", "strict"),
    )
)
_OF_TYPE = {
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "unevaluatedProperties"),
            *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
        )
    ),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "json-pointer"),
    )
)
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_UNSAFE_PATTERN = re.compile(r'"|\\[\\nrtfv0bBxuc1-9]|[\x00-\x1f]|\(\?[=!<]')
"""What would put a raw quote, backslash or control character into a string, and what is not a regular language."""
_EXCLUSIVE = (
    ("pattern", ("minLength", "maxLength", "format")),
    ("format", ("minLength", "maxLength")),
    ("multipleOf", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ("patternProperties", ("properties", "additionalProperties", "propertyNames", "minProperties")),
    ("propertyNames", ("properties", "minProperties")),
)


def schema_problems(schema: Any) -> Iterator[str]:
    """What cannot be enforced in a schema, one line each: the place, what stands there and what is allowed."""
    yield from _node(schema, "$")


def _node(node: Any, place: str) -> Iterator[str]:
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        yield f"{place}: {json.dumps(node)[:60]} given, a schema is an object or a boolean"
        return
    for name in ("$defs", "definitions"):
        yield from _children(node.get(name), f"{place}.{name}")
    keywords = set(node) - _ANNOTATIONS
    heads = [name for name in _ALONE if name in keywords]
    if heads:
        yield from _combined(node, heads[0], keywords, place)
        return
    yield from _plain(node, keywords, place)


def _combined(node: dict[str, Any], head: str, keywords: set[str], place: str) -> Iterator[str]:
    """A node of `$ref`, a combinator or listed values; only `type` may stand beside values."""
    values = node.get("enum", []) if head == "enum" else [node.get("const")]
    beside = keywords - {head}
    if head in ("enum", "const") and beside == {"type"}:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if isinstance(values, list) and all(any(_is(value, name) for name in types) for value in values):
            beside = set()
    if beside:
        yield f"{place}: {', '.join(sorted(beside))} beside {head} cannot be enforced; put all into one place"
    if head in ("anyOf", "oneOf", "allOf"):
        parts = node[head]
        if not isinstance(parts, list) or not parts:
            yield f"{place}.{head}: a list of at least one schema is expected"
            return
        if head == "allOf" and len(parts) > 1:
            yield f"{place}.allOf: {len(parts)} schemas given, allowed is 1; merge them"
        if head == "oneOf" and not _disjoint(parts):
            yield f"{place}.oneOf: its schemas may overlap, which cannot be enforced; use anyOf, or different types"
        for index, part in enumerate(parts):
            yield from _node(part, f"{place}.{head}[{index}]")


def _plain(node: dict[str, Any], keywords: set[str], place: str) -> Iterator[str]:
    """A node that names types, or leaves them to be seen from `properties` or `items`."""
    given = node.get("type")
    types = given if isinstance(given, list) else [given] if given is not None else []
    if given is None:
        types = [name for name, key in (("object", "properties"), ("array", "items")) if key in keywords]
    unknown = [name for name in types if name not in _OF_TYPE]
    if unknown:
        yield f"{place}.type: {unknown[0]!r} given, allowed are {', '.join(_OF_TYPE)}"
        return
    allowed = {"type"}.union(*(_OF_TYPE[name] for name in types))
    for name in sorted(keywords - allowed):
        known = any(name in names for names in _OF_TYPE.values())
        yield f"{place}.{name}: " + ("needs a matching type beside it" if known else "is not supported")
    for name, others in _EXCLUSIVE:
        clash = [other for other in others if other in keywords]
        if name in keywords and clash:
            yield f"{place}: {name} together with {', '.join(clash)} cannot be enforced"
    if "pattern" in keywords and (unsafe := _UNSAFE_PATTERN.search(_CLASS.sub("", str(node["pattern"])))):
        yield f"{place}.pattern: {unsafe[0]!r} is not supported outside of [...]"
    if "format" in keywords and node["format"] not in _FORMATS:
        yield f"{place}.format: {node['format']!r} given, allowed are {', '.join(sorted(_FORMATS))}"
    yield from _object(node, place)
    yield from _children(node.get("properties"), f"{place}.properties")
    yield from _children(node.get("patternProperties"), f"{place}.patternProperties")
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in node:
            yield from _node(node[name], f"{place}.{name}")
    for index, part in enumerate(node.get("prefixItems", ())):
        yield from _node(part, f"{place}.prefixItems[{index}]")


def _object(node: dict[str, Any], place: str) -> Iterator[str]:
    properties = node.get("properties", {})
    required = node.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        missing = [name for name in required if name not in properties]
        if missing:
            yield f"{place}.required: {missing[0]!r} is not among the properties"
    if "minProperties" in node and (not properties or node.get("additionalProperties", False) is not False):
        yield f"{place}.minProperties: needs properties and no additionalProperties, as keys could repeat otherwise"


def _children(nodes: Any, place: str) -> Iterator[str]:
    if nodes is None:
        return
    if not isinstance(nodes, dict):
        yield f"{place}: an object of schemas is expected"
        return
    for name, node in nodes.items():
        yield from _node(node, f"{place}.{name}")


def _disjoint(parts: list[Any]) -> bool:
    """Whether no value can match two of these: each names one type, all different."""
    types = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if any(not isinstance(name, str) for name in types) or {"integer", "number"} <= set(types):
        return False
    return len(set(types)) == len(types)


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    python = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}.get(name)
    return python is not None and isinstance(value, python)
