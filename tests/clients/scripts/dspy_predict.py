"""dspy: a prediction."""

import os

import dspy

dspy.configure(
    lm=dspy.LM(f"openai/{os.environ['MODEL']}", api_base=os.environ["BASE_URL"], api_key="none", cache=False)
)
assert dspy.Predict("question -> answer")(question="Which city is the capital of France?").answer
