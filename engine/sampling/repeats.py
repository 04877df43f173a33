"""How far counted repetitions multiply in a regular expression or a grammar.

`((a{1,100}){1,100}){1,100}` describes few texts in very many ways, and the matcher follows all of them at every token.
One such request would hold up the step loop. Does not know what else is supported.
"""

from __future__ import annotations

import re

MAX_REPEATS = 1000
"""Largest product of the upper bounds of repetitions that are inside each other."""
_COUNT = re.compile(r"\{(\d+)(?:(,)\s*(-?\d+)?)?\}")


def repeat_problem(text: str, *, has_quotes: bool) -> str | None:
    """What is wrong with the repetitions of a regular expression or of grammar rules; None if nothing is.

    Args:
        text: the regular expression or the rules.
        has_quotes: texts in double quotes stand for themselves, as in grammar rules.
    """
    inside = [1]  # by open group: the largest product of bounds in it
    last, at = 1, 0  # product of the element before `at`
    while at < len(text):
        char = text[at]
        count = _COUNT.match(text, at) if char == "{" else None
        if count is not None:
            bounds = [int(number) for number in (count[1], count[3]) if number is not None and len(number) < 10]
            product = max([1, *bounds]) * last
            if last > 1 and product > MAX_REPEATS:
                return f"repetitions inside repetitions allow {product} in total; at most {MAX_REPEATS} are allowed"
            inside[-1] = max(inside[-1], product)
            last, at = product, count.end()
            continue
        if char == "(":
            inside.append(1)
        elif char == ")" and len(inside) > 1:
            last = inside.pop()
            inside[-1] = max(inside[-1], last)
        elif not char.isspace():
            last = 1
        at = _end_of_element(text, at, has_quotes=has_quotes)
    return None


def _end_of_element(text: str, at: int, *, has_quotes: bool) -> int:
    """Index after the character, class or quoted text that begins at `at`."""
    closing = "]" if text[at] == "[" else '"' if has_quotes and text[at] == '"' else None
    if closing is None:
        return at + (2 if text[at] == "\\" else 1)
    end = at + 1
    while end < len(text) and text[end] != closing:
        end += 2 if text[end] == "\\" else 1
    return end + 1
