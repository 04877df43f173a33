"""OpenAI bodies become engine requests, and deltas become OpenAI responses."""
