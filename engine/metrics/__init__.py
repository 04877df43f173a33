"""Metric definitions and the counters behind them."""
