"""Memory of a bound plan: blocks of each tier, the copies' layout, and views of values."""
