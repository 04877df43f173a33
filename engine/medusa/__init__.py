"""Medusa heads: their forward, and drafting with them."""
