"""DFlash drafts: a block of masked positions over the target's hidden states, and drafting with it."""
