"""openai-agents: agent with a tool over the Responses API and over chat, whole and streamed."""

import asyncio
import os

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=os.environ["MODEL"], openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=100)
        agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
        result = await Runner.run(agent, "What is the weather in Paris?", max_turns=4)
        assert result.final_output
        streamed = Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=4)
        events = [event async for event in streamed.stream_events()]
        assert events
        assert streamed.final_output


asyncio.run(main())
