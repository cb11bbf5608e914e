"""Batches that fit: a sampler that fills a byte cap, and irregular computations in batches."""

from penstock.batching._meter import measured_peak
from penstock.batching.dynamic import (
    BatchedOutputs,
    BatchReport,
    BatchSchedule,
    DynamicBatcher,
    TypedGraph,
    schedule,
)
from penstock.batching.sampler import (
    BalancedBatchSampler,
    ByteModel,
    Padded,
    SampleCosts,
    probe_batches,
)

__all__ = [
    "BalancedBatchSampler",
    "BatchReport",
    "BatchSchedule",
    "BatchedOutputs",
    "ByteModel",
    "DynamicBatcher",
    "Padded",
    "SampleCosts",
    "TypedGraph",
    "measured_peak",
    "probe_batches",
    "schedule",
]
