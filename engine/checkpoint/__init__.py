"""Model folders: where they come from, their config, and reading their weights."""
