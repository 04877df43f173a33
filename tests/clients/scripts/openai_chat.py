"""openai: chat, stream with usage, tools, structured output, completions."""

import json
import os

import openai
import pydantic

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]
ANSWER = os.environ["ANSWER"]
MESSAGES = [{"role": "user", "content": "Which city is the capital of France? What is the weather there?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class Place(pydantic.BaseModel):
    city: str
    days: int


assert [model.id for model in client.models.list()] == [MODEL]
whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60)
assert whole.choices[0].message.content == (ANSWER or whole.choices[0].message.content)
assert whole.choices[0].message.content
with client.chat.completions.stream(
    model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60, stream_options={"include_usage": True}
) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.content == whole.choices[0].message.content
assert final.usage.completion_tokens == whole.usage.completion_tokens
first = client.chat.completions.create(
    model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100
)
call = first.choices[0].message.tool_calls[0]
assert "city" in json.loads(call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
second = client.chat.completions.create(
    model=MODEL, messages=[*MESSAGES, first.choices[0].message, result], tools=TOOLS, temperature=0, max_tokens=60
)
assert second.choices[0].message.content or (second.choices[0].message.tool_calls and not ANSWER)
parsed = client.chat.completions.parse(
    model=MODEL, messages=MESSAGES, response_format=Place, temperature=0, max_tokens=100
)
assert isinstance(parsed.choices[0].message.parsed, Place)
assert client.completions.create(model=MODEL, prompt="Once", max_tokens=5, temperature=0).choices[0].text
