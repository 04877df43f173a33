"""Tools for a model whose chat template has none: described in the system message, called in the Hermes form.

Owns what the model reads about tools, and how calls and results of earlier turns are shown as plain turns. Does not
know how calls are found in the response (`deployments.text`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.text.tool_calls import CLOSE, OPEN

RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
_EXAMPLE = f'{OPEN}\n{{"name": "function_name", "arguments": {{"argument": "value"}}}}\n{CLOSE}'


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of the system message that describes tools.

    Args:
        tools: definitions as clients send them.
    """
    functions = [tool["function"] for tool in tools]
    # The name comes first, as it does in a call.
    definitions = "\n".join(json.dumps({"name": f["name"], **f}, ensure_ascii=False) for f in functions)
    return (
        f"You have these functions. Each line describes one function, its arguments as a JSON Schema:\n{definitions}\n"
        f"To call a function, answer with nothing but its name and arguments in this form:\n{_EXAMPLE}\n"
        "If no function helps, answer with plain text."
    )


def plain_turns(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Turns that any chat template can show.

    Args:
        turns: as templates with tools expect them (`Message.for_template`).
        tools: definitions to describe in the system message; None or empty describes nothing.
    """
    plain = [_plain_turn(turn) for turn in turns]
    if not tools:
        return plain
    text = describe_tools(tools)
    if plain[0]["role"] == "system":
        plain[0] = plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}
    else:
        plain.insert(0, {"role": "system", "content": text})
    return plain


def _plain_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"{RESULT_OPEN}\n{turn['content']}\n{RESULT_CLOSE}"}
    plain = {key: value for key, value in turn.items() if key != "tool_calls"}
    calls = [
        f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in turn.get("tool_calls", ())
    ]
    if calls:
        plain["content"] = "\n".join(filter(None, (turn["content"], *calls)))
    return plain
