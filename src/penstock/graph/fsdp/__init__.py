"""Capture of models that FSDP2 shards: gathering and reducing as operators of the graph."""
