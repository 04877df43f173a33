"""Drafting by lookup: in the request itself, and in the texts of earlier requests."""
