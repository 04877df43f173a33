"""langchain-openai: invoke, stream, tools, structured output."""

import os

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Place(pydantic.BaseModel):
    """A place and how long to stay."""

    city: str
    days: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


model = ChatOpenAI(
    model=os.environ["MODEL"], base_url=os.environ["BASE_URL"], api_key="none", temperature=0, max_tokens=100
)
question = HumanMessage("What is the weather in Paris?")
ANSWER = os.environ["ANSWER"]
text = model.invoke([question]).content
assert text
assert text == (ANSWER or text)
assert "".join(chunk.text for chunk in model.stream([question])) == text
called = model.bind_tools([weather], tool_choice="required").invoke([question])
call = called.tool_calls[0]
assert call["name"] == "weather"
after = [question, called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
last = model.bind_tools([weather]).invoke(after)
assert last.content or (last.tool_calls and not ANSWER)
assert isinstance(model.with_structured_output(Place, method="json_schema").invoke([question]), Place)
