"""Keys and values of contexts longer than memory, in blocks over tiers."""
