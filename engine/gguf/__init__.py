"""GGUF files: reading them, and folders made of them."""

GGUF_FILE = "model.gguf"
"""The link to the GGUF file of a model that has no safetensors."""
