"""How many replicas."""
