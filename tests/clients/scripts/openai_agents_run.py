"""openai-agents: agent with a tool over the Responses API and over chat, whole and streamed."""

import asyncio
import os

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
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


async def run(agent: Agent) -> None:
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=4)
    assert result.final_output


async def run_streamed(agent: Agent) -> None:
    streamed = Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=4)
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=os.environ["MODEL"], openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=100)
        agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
        for work in (run, run_streamed):
            try:
                await work(agent)
            except MaxTurnsExceeded:  # a small model may call the tool again and again
                assert not os.environ["ANSWER"]


asyncio.run(main())
