"""pydantic-ai: agent with a tool, and structured output."""

import os

import pydantic
from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(pydantic.BaseModel):
    city: str
    days: int


provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = {"temperature": 0, "max_tokens": 100}
assert Agent(model, model_settings=settings).run_sync("Which city is the capital of France?").output
agent = Agent(model, model_settings=settings)


@agent.tool_plain
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


try:
    assert agent.run_sync("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=4)).output
except UsageLimitExceeded:  # a small model may call the tool again and again
    assert not os.environ["ANSWER"]
assert isinstance(
    Agent(model, output_type=Place, model_settings=settings).run_sync("Three days in Paris.").output, Place
)
