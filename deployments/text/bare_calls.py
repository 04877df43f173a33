"""Calls that are JSON objects without tags: Llama 3, and Mistral after `[TOOL_CALLS]`.

Owns where such calls begin and end. The result does not depend on how the text was cut. From the first thing that is no
call on, everything is text.
"""

from __future__ import annotations

import re
from typing import Literal

from deployments.text.tool_calls import (
    MISTRAL_TAG,
    PYTHON_TAG,
    ArgumentStream,
    CallCounter,
    Functions,
    ObjectScan,
    Parsed,
    ToolCallDelta,
    overlap,
)

_NAMED = re.compile(r"([a-zA-Z0-9_-]{1,64})(?:\[CALL_ID\][a-zA-Z0-9]{0,64})?(?:\[ARGS\])?[ \n]{0,4}(?=\{)")
_MAYBE_NAMED = re.compile(r"[a-zA-Z0-9_-]{1,64}(?:\[[a-zA-Z0-9_\[\]]{0,100})?[ \n]{0,4}")


class BareCallParser:
    """Finds calls that are JSON objects with separators between them.

    Args:
        functions: functions that may be called.
        marker: text that may stand before a call.
        separators: characters that may stand between calls.
        needs_marker: what precedes the marker is text. Otherwise the calls begin with the response.
        has_names: a call may also be a name followed by the object of its arguments.
    """

    def __init__(
        self, functions: Functions, *, marker: str, separators: str, needs_marker: bool, has_names: bool
    ) -> None:
        self._counter = CallCounter(functions)
        self._marker = marker
        self._separators = separators
        self._has_names = has_names
        self._state: Literal["before", "between", "inside", "text"] = "before" if needs_marker else "between"
        self._skipped = ""
        """Separators and markers before `_held`. They are shown only if text follows them."""
        self._held = ""
        self._call = ArgumentStream(self._counter)
        self._object = ObjectScan()

    @classmethod
    def llama3(cls, functions: Functions) -> BareCallParser:
        """A response that is calls of the form `{"name", "parameters"}`, with `;` or white space between them."""
        return cls(functions, marker=PYTHON_TAG, separators=" \t\r\n;", needs_marker=False, has_names=False)

    @classmethod
    def mistral(cls, functions: Functions, *, is_forced: bool) -> BareCallParser:
        """`[TOOL_CALLS]` with a list of `{"name", "arguments"}`, or with a name and its arguments.

        Args:
            is_forced: a grammar makes the response a list of calls, without the marker.
        """
        return cls(
            functions, marker=MISTRAL_TAG, separators=" \t\r\n,[]", needs_marker=not is_forced, has_names=not is_forced
        )

    @property
    def num_calls(self) -> int:
        return self._counter.num_complete

    def push(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        self._held += text
        shown: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(shown, calls):
            pass
        if self._is_text:
            shown.append(self._take_rest())
        return Parsed("".join(shown), tuple(calls))

    @property
    def _is_text(self) -> bool:
        """Whether everything that follows is text."""
        return self._state == "text"

    def _step(self, shown: list[str], calls: list[ToolCallDelta]) -> bool:
        """Go on in what is held. Returns whether more of it can be read."""
        if self._state == "before":
            return self._find_marker(shown)
        if self._state == "between":
            return self._find_call(calls)
        return self._state == "inside" and self._read_call(calls)

    def finish(self) -> Parsed:
        if self._state == "inside" and self._call.is_begun:
            self._held = ""
            return Parsed("")
        is_over = self._counter.num_begun > 0 and not self._held.strip(self._separators)
        rest = self._take_rest()
        return Parsed("" if is_over else rest)

    def _take_rest(self) -> str:
        rest, self._skipped, self._held = self._skipped + self._held, "", ""
        return rest

    def _find_marker(self, shown: list[str]) -> bool:
        """Show text up to the marker, or to what may become one. Returns whether the marker was found."""
        before, found, after = self._held.partition(self._marker)
        if not found:
            num_kept = overlap(self._held, self._marker)
            before, after = self._held[: len(self._held) - num_kept], self._held[len(self._held) - num_kept :]
        text = before.rstrip()
        if text:
            shown.append(self._skipped + text)
            self._skipped = ""
        self._skipped += before[len(text) :] + found
        self._held = after
        if found:
            self._state = "between"
        return bool(found)

    def _find_call(self, calls: list[ToolCallDelta]) -> bool:
        """Skip separators and markers. Returns whether it is clear what follows."""
        rest = self._held.lstrip(self._separators)
        # A marker that begins with a separator was stripped in part, so it is looked for before that, too.
        at = next((i for i in range(len(self._held) - len(rest) + 1) if self._held.startswith(self._marker, i)), None)
        if at is not None:
            self._skip(at + len(self._marker))
            return True
        if not rest or any(self._marker.startswith(self._held[i:]) for i in range(len(self._held) - len(rest) + 1)):
            return False
        self._skip(len(self._held) - len(rest))
        if rest.startswith("{"):
            self._call, self._object = ArgumentStream(self._counter), ObjectScan()
            self._state = "inside"
            return True
        named = _NAMED.match(rest) if self._has_names else None
        if named is not None and named[1] in self._counter.functions:
            self._call = ArgumentStream(self._counter)
            calls.append(self._call.begin(named[1], named.end()))
            self._state = "inside"
            return True
        if self._has_names and named is None and _MAYBE_NAMED.fullmatch(rest):
            return False
        self._state = "text"
        return True

    def _skip(self, num_chars: int) -> None:
        self._skipped += self._held[:num_chars]
        self._held = self._held[num_chars:]

    def _read_call(self, calls: list[ToolCallDelta]) -> bool:
        """Read on in the call at the start of what is held. Returns whether it ended."""
        if not self._call.is_begun:
            calls += self._call.find_head(self._held, 0)
        calls += self._call.read(self._held)
        if self._held.startswith("{") and not self._call.is_broken:
            end = self._object.find_end(self._held, 0)
        else:
            end = self._call.end
        if end is None:
            return False
        if not self._call.is_begun:
            call = None if self._object.is_broken else self._counter.parse(self._held[:end])
            if call is None:
                self._state = "text"
                return True
            calls.append(call)
        self._held, self._skipped = self._held[end:], ""
        self._state = "text" if self._call.is_broken or self._object.is_broken else "between"
        return True
