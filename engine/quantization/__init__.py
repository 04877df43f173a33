"""Quantised weights: how a checkpoint says that it has them, their codes, and the floats that they stand for."""
