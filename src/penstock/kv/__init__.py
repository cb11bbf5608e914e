"""KV caches in tiers: contexts longer than the memory of the device."""
