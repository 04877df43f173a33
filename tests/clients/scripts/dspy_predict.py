"""dspy: a prediction."""

import os

import dspy
from dspy.utils.exceptions import AdapterParseError

options = {"api_base": os.environ["BASE_URL"], "api_key": "none", "cache": False, "temperature": 0, "max_tokens": 100}
language_model = dspy.LM(f"openai/{os.environ['MODEL']}", **options)
dspy.configure(lm=language_model)
try:
    assert dspy.Predict("question -> answer")(question="Which city is the capital of France?").answer
except AdapterParseError:
    # A small model does not keep to dspy's form. The server owes a response, and dspy has read it.
    assert not os.environ["ANSWER"]
    assert language_model.history[-1]["outputs"][0]
    assert language_model.history[-1]["usage"]["completion_tokens"] > 0
