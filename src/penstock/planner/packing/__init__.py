"""Addresses for buffers whose lifetimes are known."""
