"""Which K for which request, and how many replicas. No torch."""
