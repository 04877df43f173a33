"""openai: Responses API, whole, streamed, tools, structured output."""

import json
import os

import openai
import pydantic

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]
ANSWER = os.environ["ANSWER"]
QUESTION = "Which city is the capital of France? What is the weather there?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]


class Place(pydantic.BaseModel):
    city: str
    days: int


whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=60)
assert whole.output_text == (ANSWER or whole.output_text)
assert whole.output_text
with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=60) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_response()
assert final.output_text == whole.output_text
assert kinds[0] == "response.created"
first = client.responses.create(
    model=MODEL, input=QUESTION, tools=TOOLS, tool_choice="required", temperature=0, max_output_tokens=100
)
call = first.output[0]
assert "city" in json.loads(call.arguments)
history = [
    {"role": "user", "content": QUESTION},
    *first.output,
    {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
]
assert client.responses.create(
    model=MODEL, input=history, tools=TOOLS, temperature=0, max_output_tokens=60, store=False
).output
parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Place, temperature=0, max_output_tokens=100)
assert isinstance(parsed.output_parsed, Place)
