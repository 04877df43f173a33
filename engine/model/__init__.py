"""Decoders on tensors: weights, layers, attention, KV cache and collectives."""
