"""What tool calls are in a model's text: their forms, their parts, and reading one JSON call while it arrives.

Owns which form a chat template uses, and the events that every parser of calls reports. Arguments are reported while
they arrive, so a client sees them grow. Does not know where a call begins or ends in the text (`tagged_calls`,
`bare_calls`), HTTP or the engine.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

ToolForm = Literal["hermes", "qwen_xml", "llama3", "mistral", "generic"]
"""How a model writes calls. `generic` is the Hermes form for a model whose template has no tools."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
MARKERS = (OPEN, CLOSE, PYTHON_TAG, MISTRAL_TAG, "[ARGS]", "[CALL_ID]")
"""Texts around calls that a tokenizer may have as special tokens. The parsers need to see them."""

_SPACE = r"\s{0,16}"
_HEAD = re.compile(
    rf'\{{{_SPACE}(?:"(?:type|id)"{_SPACE}:{_SPACE}"[\w-]{{0,64}}"{_SPACE},{_SPACE}){{0,2}}'
    rf'"name"{_SPACE}:{_SPACE}"([a-zA-Z0-9_-]{{1,64}})"{_SPACE},{_SPACE}'
    rf'"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
"""A JSON call up to its arguments. The name comes first, so the arguments can be shown while they arrive."""
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')
"""Every character that JSON has outside of strings."""

Functions = Mapping[str, Mapping[str, Any] | None]
"""Functions that may be called: name to JSON Schema of the arguments."""


def detect_form(template: str) -> ToolForm | None:
    """The form in which a chat template has calls written; None where it defines no tools, or an unknown form."""
    if "tools" not in template:
        return None
    if MISTRAL_TAG in template:
        return "mistral"
    if OPEN in template:
        return "qwen_xml" if "<function=" in template else "hermes"
    if PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    return None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What some text adds to one call."""

    number: int
    """Index of the call within the response."""
    arguments: str
    """The next characters of the arguments: a JSON object, as the model writes it."""
    id: str | None = None
    """Id of the call; set in its first delta only."""
    name: str | None = None
    """Name of the function; set in the call's first delta only."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What some text shows: text of the response, and what it adds to calls."""

    text: str
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(Protocol):
    """Incremental parsing of one response."""

    @property
    def num_calls(self) -> int:
        """Calls whose arguments are complete."""
        ...

    def push(self, text: str) -> Parsed:
        """Add text, in order."""
        ...

    def finish(self) -> Parsed:
        """What is still held back, once no more text can come."""
        ...


class _JsonCall(msgspec.Struct):
    """A complete call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallCounter:
    """Numbers the calls of one response.

    Args:
        functions: functions that may be called.
    """

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.num_begun = 0
        """Calls of which at least the name was reported."""
        self.num_complete = 0
        """Calls whose arguments are complete."""

    def begin(self, name: str, arguments: str = "") -> ToolCallDelta:
        """The first delta of the next call."""
        self.num_begun += 1
        return ToolCallDelta(self.num_begun - 1, arguments, f"call_{uuid.uuid4().hex[:24]}", name)

    def parse(self, text: str) -> ToolCallDelta | None:
        """The JSON text of a complete call as one delta; None where it is no valid call of a known function."""
        try:
            call = msgspec.json.decode(text, type=_JsonCall)
            raw = bytes(call.arguments or call.parameters or b"{}")
            msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None
        if call.name not in self.functions:
            return None
        self.num_complete += 1
        return self.begin(call.name, raw.decode().strip())


class ObjectScan:
    """Finds the end of a JSON object in a growing text. Each character is read once."""

    def __init__(self) -> None:
        self.is_broken = False
        """A character was found that JSON does not have outside of strings."""
        self._num_seen = 0
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int | None:
        """Index after the object that begins at `start`, or of the character that broke it; None until it is there."""
        for index in range(max(start, self._num_seen), len(text)):
            char = text[index]
            if self._is_string:
                self._is_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char not in _OUTSIDE_STRINGS:
                self.is_broken = True
                self._num_seen = index
                return index
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._num_seen = index
                    return index + 1
        self._num_seen = len(text)
        return None


class ArgumentStream:
    """The arguments of one JSON call, reported while they arrive.

    Once begun, the call is never taken back: arguments that stop being JSON are left incomplete.

    Args:
        counter: of the response.
    """

    def __init__(self, counter: CallCounter) -> None:
        self._counter = counter
        self._number: int | None = None
        self._start = 0
        self._num_shown = 0
        self._scan = ObjectScan()
        self.end: int | None = None
        """Index after the arguments, or of the character that broke them."""

    @property
    def is_begun(self) -> bool:
        return self._number is not None

    @property
    def is_broken(self) -> bool:
        return self._scan.is_broken

    def find_head(self, text: str, start: int) -> list[ToolCallDelta]:
        """Begin if the JSON object at `start` is a call of a known function as far as it is there."""
        match = _HEAD.match(text, start)
        if match is None or match[1] not in self._counter.functions:
            return []
        return [self.begin(match[1], match.end())]

    def begin(self, name: str, start: int) -> ToolCallDelta:
        """Begin with arguments that start at index `start`."""
        delta = self._counter.begin(name)
        self._number, self._start, self._num_shown = delta.number, start, start
        return delta

    def read(self, text: str) -> list[ToolCallDelta]:
        """New characters of the arguments in a text that has grown."""
        if self._number is None or self.end is not None:
            return []
        self.end = self._scan.find_end(text, self._start)
        num_read = len(text) if self.end is None else self.end
        new, self._num_shown = text[self._num_shown : num_read], num_read
        if self.end is not None and not self._scan.is_broken:
            self._counter.num_complete += 1
        return [ToolCallDelta(self._number, new)] if new else []


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, without being all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
