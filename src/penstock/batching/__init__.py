"""Batches that fit: below a cap, in few bins, and irregular computations in few calls."""

from penstock.batching._meter import measured_peak
from penstock.batching.dynamic import (
    BatchedOutputs,
    BatchReport,
    BatchSchedule,
    DynamicBatcher,
    TypedGraph,
    schedule,
)
from penstock.batching.packing import BinPacking, pack_bins
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
    "BinPacking",
    "ByteModel",
    "DynamicBatcher",
    "Padded",
    "SampleCosts",
    "TypedGraph",
    "measured_peak",
    "pack_bins",
    "probe_batches",
    "schedule",
]
