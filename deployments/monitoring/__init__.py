"""Metrics export, timelines, traces and request logs."""
