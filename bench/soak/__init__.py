"""Hours of mixed load with faults."""
