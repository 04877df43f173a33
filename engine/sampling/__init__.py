"""From logits to a distribution, and from a distribution to a token. Knows no request and no batch."""
