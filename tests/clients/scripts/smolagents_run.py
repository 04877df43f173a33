"""smolagents: model, and an agent that calls tools."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


model = OpenAIServerModel(
    model_id=os.environ["MODEL"], api_base=os.environ["BASE_URL"], api_key="none", max_tokens=200, temperature=0
)
assert model([{"role": "user", "content": [{"type": "text", "text": "Which city is the capital of France?"}]}]).content
assert ToolCallingAgent(tools=[weather], model=model, max_steps=3).run("What is the weather in Paris?")
