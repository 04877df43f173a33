"""Every proposer of draft tokens, alone and merged, on the same prompts."""
