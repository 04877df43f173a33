"""instructor: structured output by tools and by JSON schema."""

import os

import instructor
import openai
import pydantic


class Place(pydantic.BaseModel):
    city: str
    days: int


raw = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    place = instructor.from_openai(raw, mode=mode).chat.completions.create(
        model=os.environ["MODEL"],
        response_model=Place,
        messages=[{"role": "user", "content": "Three days in Paris, and the weather."}],
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(place, Place)
