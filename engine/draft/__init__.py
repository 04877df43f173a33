"""Drafters: the methods that propose tokens for verification."""
