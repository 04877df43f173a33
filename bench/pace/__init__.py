"""Policies compared on one server."""
