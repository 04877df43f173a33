"""The trainer of a draft that is adapted while it serves."""
