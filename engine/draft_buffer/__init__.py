"""The memory that the target and the draft share."""
