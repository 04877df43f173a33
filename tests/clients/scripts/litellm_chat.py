"""litellm: chat, stream, tools, context overflow."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

OPTIONS = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["BASE_URL"], "api_key": "none"}
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]

whole = litellm.completion(**OPTIONS, messages=MESSAGES, temperature=0, max_tokens=60)
assert whole.choices[0].message.content
assert whole.choices[0].message.content == (os.environ["ANSWER"] or whole.choices[0].message.content)
chunks = litellm.completion(**OPTIONS, messages=MESSAGES, temperature=0, max_tokens=60, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
called = litellm.completion(
    **OPTIONS, messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100
)
message = called.choices[0].message
assert "city" in json.loads(message.tool_calls[0].function.arguments)
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
litellm.completion(**OPTIONS, messages=[*MESSAGES, message.model_dump(), result], tools=TOOLS, max_tokens=60)
try:
    litellm.completion(**OPTIONS, messages=[{"role": "user", "content": "go " * 70_000}])
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt beyond the context is no ContextWindowExceededError")
