"""OpenAI's Responses API, stateless: its bodies become chat bodies, and text deltas become its objects and events."""
