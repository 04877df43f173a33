"""Names of actors that are looked up rather than handed over. Imports nothing, so that any process may know them."""

from __future__ import annotations

CONTROLLER_NAMESPACE = "paceline"


def controller_name(app_name: str) -> str:
    """Of the controller of an app, in CONTROLLER_NAMESPACE."""
    return f"controller:{app_name}"
