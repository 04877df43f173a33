"""dspy: a prediction, in dspy's own form and in JSON by a schema."""

import os

# No table of public models is fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy
import litellm

# dspy asks litellm whether a server takes JSON schemas, and litellm knows public models only.
litellm.register_model(
    {f"openai/{os.environ['MODEL']}": {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}}
)
options = {"api_base": os.environ["BASE_URL"], "api_key": "none", "cache": False, "temperature": 0, "max_tokens": 300}
language_model = dspy.LM(f"openai/{os.environ['MODEL']}", **options)
question = "Which city is the capital of France?"
if os.environ["ANSWER"]:
    with dspy.context(lm=language_model):
        assert dspy.Predict("question -> answer")(question=question).answer
else:
    # A small model does not keep to dspy's own form. The server owes that a schema is kept.
    with dspy.context(lm=language_model, adapter=dspy.JSONAdapter()):
        assert dspy.Predict("question -> answer: bool")(question="Is Paris in France?").answer in (True, False)
    assert "json_schema" in str(language_model.history[-1]["kwargs"]["response_format"])
