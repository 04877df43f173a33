"""The price of the way to a replica, in CPU time per token."""
