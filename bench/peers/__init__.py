"""Paceline beside vLLM and llama.cpp."""
