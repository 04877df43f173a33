"""Calls between `<tool_call>` and `</tool_call>`: JSON objects (Hermes, Qwen 2.5 and 3) or XML (Qwen3-Coder).

Owns where such calls begin and end. The result does not depend on how the text was cut. What is no valid call of a
known function stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deployments.text.tool_calls import (
    CLOSE,
    OPEN,
    ArgumentStream,
    CallCounter,
    Functions,
    Parsed,
    ToolCallDelta,
    overlap,
)

_FUNCTION = re.compile(r"<function=([a-zA-Z0-9_-]{1,64})>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = re.compile(r"\s*</function>")


class TaggedCallParser:
    """Finds calls between tags. White space before a call and after the last one is not shown.

    A call whose `</tool_call>` is missing when the text ends counts if its arguments are complete.

    Args:
        functions: functions that may be called.
    """

    def __init__(self, functions: Functions) -> None:
        self._counter = CallCounter(functions)
        self._space = ""
        """White space before `_held`. It is shown only if text follows it."""
        self._held = ""
        self._body: ArgumentStream | XmlCall | None = None
        """What reads the call at the start of `_held`; None outside of calls."""
        self._num_searched = 0
        """Characters of `_held` in which no CLOSE begins."""

    @property
    def num_calls(self) -> int:
        return self._counter.num_complete

    def push(self, text: str) -> Parsed:
        self._held += text
        shown: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._find_open(shown) if self._body is None else self._read_call(shown, calls):
            pass
        return Parsed("".join(shown), tuple(calls))

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        if self._body is not None:
            if self._body.is_begun:
                return Parsed("")
            call = self._counter.parse(rest)
            return Parsed("", (call,)) if call is not None else Parsed(self._take_space() + OPEN + rest)
        if not rest and self._counter.num_begun:
            return Parsed("")
        return Parsed(self._take_space() + rest)

    def _take_space(self) -> str:
        space, self._space = self._space, ""
        return space

    def _find_open(self, shown: list[str]) -> bool:
        """Show text up to the next OPEN, or to what may become one. Returns whether an OPEN was found."""
        before, found, after = self._held.partition(OPEN)
        if not found:
            num_kept = overlap(self._held, OPEN)
            before, after = self._held[: len(self._held) - num_kept], self._held[len(self._held) - num_kept :]
        text = before.rstrip()
        if text:
            shown.append(self._take_space() + text)
        self._space += before[len(text) :]
        self._held = after
        if found:
            self._body, self._num_searched = ArgumentStream(self._counter), 0
        return bool(found)

    def _read_call(self, shown: list[str], calls: list[ToolCallDelta]) -> bool:
        """Read on in the call at the start of what is held. Returns whether it ended."""
        body = self._body
        assert body is not None
        if not body.is_begun:
            start = len(self._held) - len(self._held.lstrip())
            if self._held.startswith("<function=", start):
                body = self._body = body if isinstance(body, XmlCall) else XmlCall(self._counter)
            calls += body.find_head(self._held, start)
        calls += body.read(self._held)
        if body.is_begun:
            if body.end is None:
                return False
            self._num_searched = max(self._num_searched, body.end)
        end = self._held.find(CLOSE, self._num_searched)
        if end < 0:
            self._num_searched = max(self._num_searched, len(self._held) - len(CLOSE) + 1)
            return False
        inside, self._held = self._held[:end], self._held[end + len(CLOSE) :]
        self._body = None
        if body.is_begun:
            self._space = ""
            return True
        call = self._counter.parse(inside)
        if call is None:
            shown.append(self._take_space() + OPEN + inside + CLOSE)
        else:
            self._space = ""
            calls.append(call)
        return True


class XmlCall:
    """One call as `<function=name><parameter=key>value</parameter>...</function>`. Each parameter is reported whole."""

    def __init__(self, counter: CallCounter) -> None:
        self._counter = counter
        self._number: int | None = None
        self._schema: Mapping[str, Any] = {}
        self._properties: dict[str, Any] = {}
        self._position = 0
        self._num_parameters = 0
        self.end: int | None = None
        """Index after `</function>`, or of the `</tool_call>` that comes instead."""

    @property
    def is_begun(self) -> bool:
        return self._number is not None

    def find_head(self, text: str, start: int) -> list[ToolCallDelta]:
        """Begin if a known function is called at `start`."""
        match = _FUNCTION.match(text, start)
        if match is None or match[1] not in self._counter.functions:
            return []
        schema = self._counter.functions[match[1]] or {}
        properties = schema.get("properties")
        self._schema, self._properties = schema, properties if isinstance(properties, dict) else {}
        self._position = match.end()
        delta = self._counter.begin(match[1])
        self._number = delta.number
        return [delta]

    def read(self, text: str) -> list[ToolCallDelta]:
        """The parameters that are complete in a text that has grown, as characters of a JSON object."""
        if self._number is None or self.end is not None:
            return []
        new = ""
        while match := _PARAMETER.match(text, self._position):
            self._position = match.end()
            value = self._value(match[1], match[2])
            new += f"{', ' if self._num_parameters else '{'}{json.dumps(match[1])}: {value}"
            self._num_parameters += 1
        end = _END.match(text, self._position)
        if end is not None:
            self.end = end.end()
            new += "}" if self._num_parameters else "{}"
            self._counter.num_complete += 1
        elif self._is_malformed(text[self._position :].lstrip()):
            close = text.find(CLOSE, self._position)
            self.end = close if close >= 0 else None
        return [ToolCallDelta(self._number, new)] if new else []

    @staticmethod
    def _is_malformed(rest: str) -> bool:
        """Whether neither a parameter nor the end of the call can follow."""
        return bool(rest) and not any(
            rest.startswith(expected) or expected.startswith(rest) for expected in ("<parameter=", "</function>")
        )

    def _value(self, key: str, text: str) -> str:
        """JSON of a parameter: text where the schema says so or where it is no JSON, else what it spells."""
        definition: Any = self._properties.get(key)
        if isinstance(definition, dict) and str(definition.get("$ref", "")).startswith("#/"):
            definition = self._schema
            for part in self._properties[key]["$ref"][2:].split("/"):
                definition = definition.get(part) if isinstance(definition, Mapping) else None
        if not (isinstance(definition, Mapping) and definition.get("type") == "string"):
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)
