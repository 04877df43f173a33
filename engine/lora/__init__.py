"""LoRA adapters of the target: their files, their shapes, and the linear layers that add them."""
