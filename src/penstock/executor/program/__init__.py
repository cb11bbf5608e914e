"""Programs: a plan compiled to calls, with all arguments in place."""
