"""Training data: what the target writes, stored in shards."""
