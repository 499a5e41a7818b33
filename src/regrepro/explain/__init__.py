"""What does this log mean? Registration failures in logs and traces, and what they can and cannot be."""
