"""Forwards as CUDA graphs: one replay instead of hundreds of launches."""
