"""Logits become a distribution, and a distribution becomes a token. Knows no request."""
