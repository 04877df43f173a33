"""Communication between processes other than the draft buffer."""
