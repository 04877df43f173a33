"""Drafts trained from a target."""
