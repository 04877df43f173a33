"""`paceline bench gpu`: checks and measures the GPU path on one device."""
