"""Training a draft and measuring it."""
