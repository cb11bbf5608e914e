"""Partitions of training steps over several devices, under one budget each."""
