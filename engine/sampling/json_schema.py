"""Which JSON schemas are supported: those where the grammar compiler enforces every keyword.

Owns the list of supported keywords and of the keywords that cannot be combined; `schema_values` checks their values.
The compiler ignores unknown keywords, so a response could violate the schema. This module refuses such a schema and
names the path and the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from engine.sampling.schema_values import listed_problems, number_problems, pattern_problem

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
_EXCLUSIVE = (
    ("pattern", ("minLength", "maxLength", "format")),
    ("format", ("minLength", "maxLength")),
    ("multipleOf", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ("patternProperties", ("properties", "additionalProperties", "propertyNames", "minProperties")),
    ("propertyNames", ("properties", "minProperties")),
)


def schema_problems(schema: Any) -> Iterator[str]:
    """The unsupported parts of a schema. One line each: path, value found, values allowed."""
    yield from _node(schema, "$")


def _node(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        yield f"{path}: {json.dumps(node)[:60]} given, a schema is an object or a boolean"
        return
    for name in ("$defs", "definitions"):
        yield from _children(node.get(name), f"{path}.{name}")
    keywords = set(node) - _ANNOTATIONS
    heads = [name for name in _ALONE if name in keywords]
    if heads:
        yield from _combined(node, heads[0], keywords, path)
        return
    yield from _plain(node, keywords, path)


def _combined(node: dict[str, Any], head: str, keywords: set[str], path: str) -> Iterator[str]:
    """Problems of a node with `$ref`, a combinator or listed values. Only `type` may accompany listed values."""
    values = node.get("enum", []) if head == "enum" else [node.get("const")]
    others = keywords - {head}
    if head in ("enum", "const") and others == {"type"}:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if isinstance(values, list) and all(any(_is(value, name) for name in types) for value in values):
            others = set()
    if others:
        yield f"{path}: {', '.join(sorted(others))} together with {head} cannot be enforced; use only one of them"
    for value in values if head in ("enum", "const") and isinstance(values, list) else ():
        yield from listed_problems(value, f"{path}.{head}")
    if head in ("anyOf", "oneOf", "allOf"):
        parts = node[head]
        if not isinstance(parts, list) or not parts:
            yield f"{path}.{head}: a list of at least one schema is expected"
            return
        if head == "allOf" and len(parts) > 1:
            yield f"{path}.allOf: {len(parts)} schemas given, allowed is 1; merge them"
        if head == "oneOf" and not _disjoint(parts):
            yield f"{path}.oneOf: its schemas may overlap, which cannot be enforced; use anyOf, or different types"
        for index, part in enumerate(parts):
            yield from _node(part, f"{path}.{head}[{index}]")


def _plain(node: dict[str, Any], keywords: set[str], path: str) -> Iterator[str]:
    """Problems of a node that names its types, or implies them by `properties` or `items`."""
    given = node.get("type")
    types = given if isinstance(given, list) else [given] if given is not None else []
    if given is None:
        types = [name for name, key in (("object", "properties"), ("array", "items")) if key in keywords]
    unknown = [name for name in types if name not in _OF_TYPE]
    if unknown:
        yield f"{path}.type: {unknown[0]!r} given, allowed are {', '.join(_OF_TYPE)}"
        return
    allowed = {"type"}.union(*(_OF_TYPE[name] for name in types))
    for name in sorted(keywords - allowed):
        known = any(name in names for names in _OF_TYPE.values())
        yield f"{path}.{name}: " + ("needs a matching type in the same schema" if known else "is not supported")
    for name, others in _EXCLUSIVE:
        clash = [other for other in others if other in keywords]
        if name in keywords and clash:
            yield f"{path}: {name} together with {', '.join(clash)} cannot be enforced"
    if "pattern" in keywords and (problem := pattern_problem(str(node["pattern"]))):
        yield f"{path}.pattern: {problem}"
    yield from number_problems(node, types, path)
    if "format" in keywords and node["format"] not in _FORMATS:
        yield f"{path}.format: {node['format']!r} given, allowed are {', '.join(sorted(_FORMATS))}"
    yield from _object(node, path)
    yield from _children(node.get("properties"), f"{path}.properties")
    yield from _children(node.get("patternProperties"), f"{path}.patternProperties")
    for pattern in node.get("patternProperties") or ():
        if problem := pattern_problem(str(pattern)):
            yield f"{path}.patternProperties: {problem}"
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in node:
            yield from _node(node[name], f"{path}.{name}")
    for index, part in enumerate(node.get("prefixItems", ())):
        yield from _node(part, f"{path}.prefixItems[{index}]")


def _object(node: dict[str, Any], path: str) -> Iterator[str]:
    properties = node.get("properties", {})
    required = node.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        missing = [name for name in required if name not in properties]
        if missing:
            yield f"{path}.required: {missing[0]!r} is not among the properties"
    if "minProperties" in node and (not properties or node.get("additionalProperties", False) is not False):
        yield f"{path}.minProperties: needs properties and no additionalProperties, as keys could repeat otherwise"


def _children(nodes: Any, path: str) -> Iterator[str]:
    if nodes is None:
        return
    if not isinstance(nodes, dict):
        yield f"{path}: an object of schemas is expected"
        return
    for name, node in nodes.items():
        yield from _node(node, f"{path}.{name}")


def _disjoint(parts: list[Any]) -> bool:
    """Whether no value matches two of these schemas: each names one type, and the types differ."""
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
