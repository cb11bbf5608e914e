"""What of a program stays in fixed scratchpads, and where."""
