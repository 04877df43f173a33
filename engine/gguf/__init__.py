"""GGUF files: reading them, and folders made of them."""
