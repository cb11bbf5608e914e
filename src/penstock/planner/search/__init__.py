"""The planner itself: order, residency, recomputation and addresses by search."""
