"""Policies replayed on hardware that need not exist."""
