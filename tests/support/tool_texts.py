"""Tools and texts with calls that several tests share."""

from __future__ import annotations

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
FUNCTIONS = {"weather": WEATHER["function"]["parameters"], "time": None}
PARIS = '{"city": "Paris 🙂"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
LLAMA_ONE = f'{{"name": "weather", "parameters": {PARIS}}}'
MISTRAL_LIST = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {{}}}}]'
