"""The memory that target and draft share: draft requests, responses, probabilities and features."""
