"""Tensors: the decoder and what it is made of."""
