"""Splitting of operators that need more memory at once than a budget allows."""
