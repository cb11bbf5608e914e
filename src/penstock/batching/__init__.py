"""Batches that fit: batch samplers that fill a byte budget."""

from penstock.batching._costs import SampleCosts
from penstock.batching._sampler import BalancedBatchSampler
from penstock.batching._schedule import Schedule, schedule

__all__ = ["BalancedBatchSampler", "SampleCosts", "Schedule", "schedule"]
