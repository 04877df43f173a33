"""The `paceline` command. Above every other package and imported by none."""
