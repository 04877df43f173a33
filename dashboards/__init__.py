"""Grafana dashboards and Prometheus alerts as code. Reads only `engine.metrics.definitions`."""
