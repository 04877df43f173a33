"""Communication between processes, except for the draft buffer."""
