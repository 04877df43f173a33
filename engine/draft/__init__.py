"""Who proposes draft tokens."""
