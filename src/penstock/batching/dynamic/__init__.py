"""Dynamic batching: irregular computations in few calls of ordinary modules."""
