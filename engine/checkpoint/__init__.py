"""Files of a model: where they come from and what they mean."""
