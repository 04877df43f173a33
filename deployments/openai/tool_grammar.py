"""The grammar of answers that must be calls of tools.

Owns how the tools' schemas and the form of a call become one grammar. Does not know how calls are found again (`tools`)
or who asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import xgrammar

from deployments.openai.messages import Tool, ToolChoice
from deployments.openai.structured import check_grammar
from deployments.text.tool_calls import CLOSE, OPEN, ToolForm
from engine.errors import InvalidRequest
from engine.messages import GrammarSpec

MAX_FORCED_CALLS = 16
"""Calls in one answer where calling is required."""


def forcing_grammar(form: ToolForm, tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool) -> GrammarSpec:
    """The grammar of answers that are nothing but calls of the chosen tools, their arguments by their schemas.

    Raises:
        InvalidRequest: a tool's schema cannot be enforced; field `tools`.
    """
    chosen = [tool for tool in tools if choice.mode != "named" or tool.function.name == choice.name]
    key = "arguments" if form == "hermes" else "parameters"
    schema = GrammarSpec(kind="json_schema", text=json.dumps(_calls_schema(chosen, key), ensure_ascii=False))
    check_grammar(schema, "tools")
    if form == "llama3":
        return schema
    try:
        rules = str(xgrammar.Grammar.from_json_schema(schema.text, any_whitespace=False))
    except RuntimeError as error:
        raise InvalidRequest(f"tools: {str(error)[:300]}", field="tools") from error
    # The schema refers to itself by its definitions only, so nothing else names the start rule.
    rules = rules.replace("\nroot ::=", "\ntool_call ::=") if "\nroot ::=" in rules else "tool_" + rules
    call = f'"{OPEN}\\n" tool_call "\\n{CLOSE}"'
    more = f' ("\\n" {call}){{0,{MAX_FORCED_CALLS - 1}}}' if is_parallel else ""
    spec = GrammarSpec(kind="ebnf", text=f"root ::= {call}{more}\n{rules}")
    check_grammar(spec, "tools")
    return spec


def _calls_schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """A call of any of these tools. Parameters become definitions, and references inside them follow."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                key: {"$ref": f"#/$defs/{tool.function.name}"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    definitions = {tool.function.name: _moved(tool.function.parameters, tool.function.name) for tool in tools}
    return {"$defs": definitions} | (calls[0] if len(calls) == 1 else {"anyOf": calls})


def _moved(schema: Any, name: str) -> Any:
    """A schema as it reads below `#/$defs/name`."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if isinstance(schema, dict):
        return {
            key: f"#/$defs/{name}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, name)
            if value is not None
            else None
            for key, value in schema.items()
        }
    return [_moved(item, name) if item is not None else None for item in schema] if isinstance(schema, list) else schema
