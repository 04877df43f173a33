"""How a model writes calls of tools: which form its chat template uses, and finding calls in its text.

Owns the two forms, Hermes (`<tool_call>{...}</tool_call>`) and Llama 3 (a bare JSON object). Parsing is incremental and
its result does not depend on how the text was cut. What is no valid call of a known function stays text. Does not know
HTTP or the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

ToolForm = Literal["hermes", "llama3"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


def detect_form(template: str) -> ToolForm | None:
    """The form in which a chat template has calls written; None where it defines no tools, or another form."""
    if "tools" not in template:
        return None
    if OPEN in template and "<function=" not in template:
        return "hermes"
    if PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    return None


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call in a model's text."""

    number: int
    """From 0 within the answer."""
    id: str
    name: str
    arguments: str
    """The JSON object as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What some text shows: text of the answer, and calls completed in it."""

    text: str
    calls: tuple[FoundCall, ...] = ()


class ToolCallParser(Protocol):
    """Incremental parsing of one answer."""

    @property
    def num_calls(self) -> int:
        """Calls completed so far."""
        ...

    def push(self, text: str) -> Parsed:
        """Add text, in order."""
        ...

    def finish(self) -> Parsed:
        """What is still held back, once no more text can come."""
        ...


def make_parser(form: ToolForm, names: Collection[str]) -> ToolCallParser:
    """A fresh parser for one answer.

    Args:
        names: functions that may be called.
    """
    return HermesParser(names) if form == "hermes" else Llama3Parser(names)


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Calls:
    """Turns JSON text into calls and numbers them."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.count = 0

    def parse(self, text: str) -> FoundCall | None:
        try:
            written = msgspec.json.decode(text, type=_Written)
            raw = bytes(written.arguments or written.parameters or b"{}")
            msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None
        if written.name not in self._names:
            return None
        self.count += 1
        return FoundCall(self.count - 1, f"call_{uuid.uuid4().hex[:24]}", written.name, raw.decode().strip())


class HermesParser:
    """Calls between `<tool_call>` and `</tool_call>`; white space around them belongs to nobody.

    A call whose end is missing when the text ends counts if its JSON is complete.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._space = ""
        """White space before what is held: shown only if text follows it."""
        self._held = ""
        self._is_inside = False
        self._num_searched = 0
        """Characters of `_held` in which no CLOSE begins."""

    @property
    def num_calls(self) -> int:
        return self._calls.count

    def push(self, text: str) -> Parsed:
        self._held += text
        shown: list[str] = []
        calls: list[FoundCall] = []
        while self._find_close(shown, calls) if self._is_inside else self._find_open(shown):
            pass
        return Parsed("".join(shown), tuple(calls))

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        if self._is_inside:
            call = self._calls.parse(rest)
            if call is not None:
                return Parsed("", (call,))
            return Parsed(self._take_space() + OPEN + rest)
        if not rest and self._calls.count:
            return Parsed("")
        return Parsed(self._take_space() + rest)

    def _take_space(self) -> str:
        space, self._space = self._space, ""
        return space

    def _find_open(self, shown: list[str]) -> bool:
        """Show text up to the next OPEN, or to what may become one; whether an OPEN was found."""
        before, found, after = self._held.partition(OPEN)
        if not found:
            num_kept = _overlap(self._held, OPEN)
            before, after = self._held[: len(self._held) - num_kept], self._held[len(self._held) - num_kept :]
        text = before.rstrip()
        if text:
            shown.append(self._take_space() + text)
        self._space += before[len(text) :]
        self._held = after
        self._is_inside, self._num_searched = bool(found), 0
        return bool(found)

    def _find_close(self, shown: list[str], calls: list[FoundCall]) -> bool:
        """End the call if its CLOSE is there; whether it was."""
        end = self._held.find(CLOSE, self._num_searched)
        if end < 0:
            self._num_searched = max(0, len(self._held) - len(CLOSE) + 1)
            return False
        inside, self._held = self._held[:end], self._held[end + len(CLOSE) :]
        self._is_inside = False
        call = self._calls.parse(inside)
        if call is None:
            shown.append(self._take_space() + OPEN + inside + CLOSE)
        else:
            self._space = ""
            calls.append(call)
        return True


class Llama3Parser:
    """An answer that is a JSON object with `name` and `parameters`, or several with `;` or white space between them.

    `<|python_tag|>` may stand before the first. From the first thing that is no call on, everything is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._held = ""
        self._is_text = False
        self._scan = _ObjectScan()

    @property
    def num_calls(self) -> int:
        return self._calls.count

    def push(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        self._held += text
        calls: list[FoundCall] = []
        while not self._is_text:
            start = self._start()
            end = None if start is None else self._scan.find_end(self._held, start)
            if self._is_text:
                break
            if end is None:
                return Parsed("", tuple(calls))
            call = self._calls.parse(self._held[start:end])
            self._scan = _ObjectScan()
            if call is None:
                self._is_text = True
            else:
                calls.append(call)
                self._held = self._held[end:]
        shown, self._held = self._held, ""
        return Parsed(shown, tuple(calls))

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        return Parsed("" if self._calls.count and not rest.strip(" \t\r\n;") else rest)

    def _start(self) -> int | None:
        """Where the next object begins in what is held; None where it is too early to tell, or it is text."""
        separators = " \t\r\n;" if self._calls.count else " \t\r\n"
        rest = self._held.lstrip(separators)
        if not self._calls.count and rest.startswith(PYTHON_TAG):
            rest = rest[len(PYTHON_TAG) :].lstrip(separators)
        elif not self._calls.count and rest and PYTHON_TAG.startswith(rest):
            return None
        if not rest:
            return None
        self._is_text = not rest.startswith("{")
        return None if self._is_text else len(self._held) - len(rest)


class _ObjectScan:
    """Finds the end of a JSON object, each character looked at once."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int | None:
        """Index after the object that begins at `start`; the text may grow between calls."""
        for index in range(max(start, self._num_seen), len(text)):
            char = text[index]
            if self._is_string:
                self._is_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        self._num_seen = len(text)
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
