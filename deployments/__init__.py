"""Ray Serve: HTTP, the OpenAI protocol, placement and settings."""
