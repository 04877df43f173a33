"""LoRA adapters of an app: which are served, and the routes that load and drop them."""
