"""Policies beside each other on one server."""
