"""Which parser reads the calls of which form."""

from __future__ import annotations

from deployments.text.bare_calls import BareCallParser
from deployments.text.tagged_calls import TaggedCallParser
from deployments.text.tool_calls import Functions, ToolCallParser, ToolForm


def make_parser(form: ToolForm, functions: Functions, *, is_forced: bool = False) -> ToolCallParser:
    """A fresh parser for one response.

    Args:
        functions: functions that may be called.
        is_forced: a grammar makes the response nothing but calls.
    """
    if form == "llama3":
        return BareCallParser.llama3(functions)
    if form == "mistral":
        return BareCallParser.mistral(functions, is_forced=is_forced)
    return TaggedCallParser(functions)
