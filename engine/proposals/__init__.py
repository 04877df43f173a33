"""Proposers of one request merged into one draft tree."""
