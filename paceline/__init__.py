"""The `paceline` command. Above every other package and imported by none."""

__version__ = "0.1.0"
