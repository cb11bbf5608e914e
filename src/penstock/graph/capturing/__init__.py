"""Capture of a training step: its program runs once on fake tensors and is recorded."""
