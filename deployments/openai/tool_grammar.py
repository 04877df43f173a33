"""The grammars of responses that call tools.

Owns how the tools' schemas and the form of a call become one grammar. Does not know how calls are found in a response
or when a grammar is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deployments.openai.messages import Tool, ToolChoice
from deployments.openai.structured import check_grammar
from deployments.text.tool_calls import CLOSE, OPEN, ToolForm
from engine.messages import CheckGrammar, GrammarSpec

MAX_FORCED_CALLS = 16
"""Most calls in one response that must call tools."""


def forcing_grammar(
    form: ToolForm, tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool, check: CheckGrammar
) -> GrammarSpec:
    """The grammar of responses that are nothing but calls of the chosen tools, with arguments by their schemas.

    The Qwen XML form is forced as JSON between its tags, which its parser reads as well. The Mistral form is forced as
    a list of calls without its marker, which is a special token that no grammar can produce.

    Raises:
        InvalidRequest: a tool's schema cannot be enforced; field `tools`.
    """
    chosen = [tool for tool in tools if choice.mode != "named" or tool.function.name == choice.name]
    call = _calls_schema(chosen, "parameters" if form == "llama3" else "arguments")
    if form == "mistral":
        most = MAX_FORCED_CALLS if is_parallel else 1
        definitions = call.pop("$defs")
        call = {"$defs": definitions, "type": "array", "items": call, "minItems": 1, "maxItems": most}
    schema = GrammarSpec(kind="json_schema", text=json.dumps(call, ensure_ascii=False))
    ebnf = check_grammar(schema, "tools", check)
    if form in ("llama3", "mistral"):
        return schema
    return _tagged_calls(ebnf, is_parallel=is_parallel, check=check)


def text_or_calls(tools: Sequence[Tool], *, is_parallel: bool, check: CheckGrammar) -> GrammarSpec:
    """The grammar of a response in the generic form: calls by the tools' schemas, or text that does not begin with `<`.

    Raises:
        InvalidRequest: a tool's schema cannot be enforced; field `tools`.
    """
    schema = GrammarSpec(kind="json_schema", text=json.dumps(_calls_schema(tools, "arguments"), ensure_ascii=False))
    ebnf = check_grammar(schema, "tools", check)
    return _tagged_calls(ebnf, is_parallel=is_parallel, check=check, others=r'"" | [^<] [^\0]* | ')


def _tagged_calls(ebnf: str, *, is_parallel: bool, check: CheckGrammar, others: str = "") -> GrammarSpec:
    """One call or, if parallel, several, each between tags and by the rules; `others` are alternatives, in EBNF."""
    # The schema refers to itself by its definitions only, so nothing else names the start rule.
    rules = f"\n{ebnf}".replace("\nroot ::=", "\ntool_call ::=", 1)
    call = f'"{OPEN}\\n" tool_call "\\n{CLOSE}"'
    more = f' ("\\n" {call}){{0,{MAX_FORCED_CALLS - 1}}}' if is_parallel else ""
    spec = GrammarSpec(kind="ebnf", text=f"root ::= {others}{call}{more}{rules}")
    check_grammar(spec, "tools", check)
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
    return {"$defs": definitions, "anyOf": calls}


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
