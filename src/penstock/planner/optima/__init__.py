"""The best plans of small graphs."""
