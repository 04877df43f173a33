"""A model's text: token ids to and from text, stop strings, thoughts and tool calls in it. Knows no HTTP."""
