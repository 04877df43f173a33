"""The model's thoughts: text between `<think>` and `</think>` before its response.

Owns which templates have them and where they end in a stream. The result does not depend on how the text was cut. Does
not know tool calls or the wire format.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.text.tool_calls import overlap

THINK, END_THINK = "<think>", "</think>"


def has_thoughts(template: str) -> bool:
    """Whether a chat template belongs to a model that writes thoughts in a known form."""
    return END_THINK in template


@dataclass(frozen=True, slots=True)
class Thought:
    """What some text shows: a part of the thoughts, and a part of the text after them."""

    reasoning: str
    text: str


class ThoughtParser:
    """Splits one response into thoughts and text. White space around the thoughts is not shown.

    Args:
        is_open: the prompt has begun the thoughts, so the response continues them.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_inside = is_open
        self._is_over = False
        self._held = ""
        self._has_shown = False
        """Some of the thoughts, or some of the text after them, was shown."""

    @property
    def is_over(self) -> bool:
        """Whether everything that follows is text."""
        return self._is_over

    def push(self, text: str) -> Thought:
        """Add text, in order."""
        if self._is_over and self._has_shown:
            return Thought("", text)
        self._held += text
        if not self._is_inside and not self._is_over and not self._begin():
            return Thought("", "")
        reasoning = self._take_reasoning() if self._is_inside else ""
        return Thought(reasoning, self._take_text() if self._is_over else "")

    def finish(self) -> Thought:
        """What is still held back, once no more text can come."""
        rest, self._held = self._held, ""
        if self._is_inside:
            return Thought(rest.rstrip(), "")
        return Thought("", "" if self._is_over else rest)

    def _begin(self) -> bool:
        """Decide whether the response begins with thoughts. Returns whether that is clear."""
        rest = self._held.lstrip()
        if rest.startswith(THINK):
            self._is_inside = True
            self._held = rest[len(THINK) :]
        elif THINK.startswith(rest):
            return False
        else:
            self._is_over = self._has_shown = True
        return True

    def _take_reasoning(self) -> str:
        before, found, after = self._held.partition(END_THINK)
        if not found:
            num_kept = overlap(self._held, END_THINK)
            before, after = self._held[: len(self._held) - num_kept], self._held[len(self._held) - num_kept :]
        if not self._has_shown:
            before = before.lstrip()
        shown = before.rstrip()
        self._held = after if found else before[len(shown) :] + after
        self._has_shown = self._has_shown or bool(shown)
        if found:
            self._is_inside, self._is_over, self._has_shown = False, True, False
        return shown

    def _take_text(self) -> str:
        text, self._held = self._held if self._has_shown else self._held.lstrip(), ""
        self._has_shown = self._has_shown or bool(text)
        return text
