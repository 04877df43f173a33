"""The drafts that are trained, and their files."""
