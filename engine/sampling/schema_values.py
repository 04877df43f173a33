"""Which numbers and patterns of a JSON schema the grammar compiler enforces exactly.

The compiler rounds bounds of numbers to six decimals, reads integers as 64 bits, and drops some values without an
error. A response could then violate the schema, or be no JSON at all. This module names each such value. Knows one
schema node or one value at a time; `json_schema` walks the whole schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from engine.sampling.repeats import repeat_problem

NUM_DECIMALS = 6
"""Most decimals of a number that has bounds."""
MAX_MULTIPLE = 1024
"""Largest `multipleOf` that is not ignored."""
MAX_EXCLUSIVE = 1 << 32
"""Largest exclusive bound of a number. Beyond it, a text just above the bound may be read as the bound itself: doubles
are further apart than NUM_DECIMALS decimals."""
_LIMIT = 1 << 63
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_UNSAFE = re.compile(
    r'"|\\[\\0-9A-CE-RT-VX-Za-ce-rt-vx-z]|[\x00-\x1f]|\(\?[=!<]|(?<!\\)\]|(?<=[^(|:\\])\^|(?<!\\)\$(?=[^)|])'
)
"""Parts of a pattern that could produce a raw quote, backslash or control character, are not a regular language, or
are read differently: a bracket that closes nothing, and an anchor in the middle, which is ignored."""
_MEMBER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\u\{(?P<v>[0-9a-fA-F]{1,6})\}|\\c(?P<c>[A-Za-z])|(?P<p>\\?.)",
    re.DOTALL,
)
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "b": 8, "a": 7, "e": 27, "0": 0}


def listed_problems(value: Any, path: str) -> Iterator[str]:
    """Numbers in a value of `enum` or `const` that would not be written as they are."""
    if isinstance(value, list):
        for item in value:
            yield from listed_problems(item, path)
    elif isinstance(value, dict):
        for item in value.values():
            yield from listed_problems(item, path)
    elif not _is_finite(value) or (isinstance(value, int) and not -_LIMIT <= value < _LIMIT):
        yield f"{path}: a number beyond 64 bits cannot be enforced exactly"


def number_problems(node: Mapping[str, Any], types: list[Any], path: str) -> Iterator[str]:
    """Bounds, counts and factors of one schema node that the compiler rounds or ignores.

    Args:
        node: the schema.
        types: its types.
        path: where it is, for the messages.
    """
    for name in _COUNTS:
        if _is_number(node.get(name)) and node[name] < 0:
            yield f"{path}.{name}: {_shown(node[name])} given, 0 or more is allowed"
    factor = node.get("multipleOf")
    if _is_number(factor) and not (1 <= factor <= MAX_MULTIPLE and factor == int(factor)):
        yield f"{path}.multipleOf: {_shown(factor)} given, allowed are whole numbers from 1 to {MAX_MULTIPLE}"
    bounds = {name: node[name] for name in _BOUNDS if _is_number(node.get(name))}
    problems = [line for name, bound in bounds.items() for line in _bound_problems(bound, types, f"{path}.{name}")]
    yield from problems
    if "number" in types and not problems:
        yield from _empty_range(bounds, path)


def _bound_problems(bound: float, types: list[Any], path: str) -> Iterator[str]:
    if not _is_finite(bound) or abs(bound) > _LIMIT:
        yield f"{path}: a number beyond 64 bits cannot be enforced exactly"
    elif "number" in types and Decimal(repr(bound)) != Decimal(f"{bound:.{NUM_DECIMALS}f}"):
        yield f"{path}: {_shown(bound)} given, at most {NUM_DECIMALS} decimals can be enforced exactly"
    elif "number" in types and abs(bound) > MAX_EXCLUSIVE and path.rpartition(".")[2].startswith("exclusive"):
        yield f"{path}: {_shown(bound)} given, at most {MAX_EXCLUSIVE} is allowed for a number; use minimum or maximum"


def _empty_range(bounds: Mapping[str, float], path: str) -> Iterator[str]:
    """A problem if no number of so many decimals is within the bounds. The compiler would allow an empty text."""
    unit = Decimal(1).scaleb(-NUM_DECIMALS)
    least = [
        Decimal(repr(bounds[name])) + unit * add
        for name, add in (("minimum", 0), ("exclusiveMinimum", 1))
        if name in bounds
    ]
    most = [
        Decimal(repr(bounds[name])) - unit * add
        for name, add in (("maximum", 0), ("exclusiveMaximum", 1))
        if name in bounds
    ]
    if least and most and max(least) > min(most):
        yield f"{path}: no number of at most {NUM_DECIMALS} decimals is within the bounds"


def pattern_problem(pattern: str) -> str | None:
    """What in a pattern cannot be enforced inside a JSON string; None if all of it can."""
    unsafe = _UNSAFE.search(_CLASS.sub("x", pattern))
    if unsafe is not None:
        return f"{unsafe[0]!r} is not supported outside of [...]"
    for found in _CLASS.finditer(pattern):
        if _is_empty_in_json(found[0][1:-1]):
            return f"{found[0]!r} has no character that a JSON string can hold as it is"
    return repeat_problem(pattern, has_quotes=False)


def _is_empty_in_json(members: str) -> bool:
    """Whether a class has only characters that JSON writes as escapes. The compiler would write them raw."""
    if members.startswith("^"):
        return members == "^"
    codes = [_code(found) for found in _MEMBER.finditer(members)]
    index = 0
    while index < len(codes):
        first = last = codes[index]
        if index + 2 < len(codes) and codes[index + 1] == ord("-"):
            last = codes[index + 2]
            index += 2
        index += 1
        if (
            first is None
            or last is None
            or any(not _is_escaped(code) for code in (last, *range(first, min(last, first + 64))))
        ):
            return False
    return True


def _code(member: re.Match[str]) -> int | None:
    """The character of a member of a class; None for a set of characters such as `\\d`."""
    for name in ("x", "u", "v"):
        if member[name] is not None:
            return int(member[name], 16)
    if member["c"] is not None:
        return ord(member["c"].upper()) - 64
    text = member["p"]
    if len(text) == 1:
        return ord(text)
    return None if text[1] in "dDsSwWpP" else _CONTROLS.get(text[1], ord(text[1]))


def _is_escaped(code: int) -> bool:
    return code < 0x20 or chr(code) in '"\\'


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether a value is no number, or one that a double can hold."""
    try:
        return not _is_number(value) or math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: float) -> str:
    text = repr(value) if _is_finite(value) else "a very large number"
    return text if len(text) <= 40 else text[:40] + "..."
