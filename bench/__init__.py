"""Load generators and measurements, always side by side."""
