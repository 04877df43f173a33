"""The controller and what it exchanges with the engines."""
