"""Measurements of a draft that learns from live traffic."""
