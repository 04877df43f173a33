"""Ray actors: where they are placed, how they start, and how they are replaced."""
