"""Which K: policies, the cost model and acceptance rates."""
