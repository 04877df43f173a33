"""Costs of forwards and drafts, timed at start and kept on disk."""
