"""Batches that fit: a sampler that fills a byte budget, and irregular computations in batches."""

from penstock.batching._byte_model import ByteModel, Padded, probe_batches
from penstock.batching._costs import SampleCosts
from penstock.batching._dynamic import DynamicBatcher
from penstock.batching._meter import measured_peak
from penstock.batching._outputs import BatchedOutputs, BatchReport
from penstock.batching._sampler import BalancedBatchSampler
from penstock.batching._schedule import Schedule, schedule
from penstock.batching._typed_graph import TypedGraph

__all__ = [
    "BalancedBatchSampler",
    "BatchReport",
    "BatchedOutputs",
    "ByteModel",
    "DynamicBatcher",
    "Padded",
    "SampleCosts",
    "Schedule",
    "TypedGraph",
    "measured_peak",
    "probe_batches",
    "schedule",
]
