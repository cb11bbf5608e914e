"""Batches that fit: a sampler that fills a byte cap, and irregular computations in batches."""

from penstock.batching._meter import measured_peak
from penstock.batching.dynamic._batcher import DynamicBatcher
from penstock.batching.dynamic._outputs import BatchedOutputs, BatchReport
from penstock.batching.dynamic._schedule import BatchSchedule, schedule
from penstock.batching.dynamic._typed_graph import TypedGraph
from penstock.batching.sampler._byte_model import ByteModel, Padded, probe_batches
from penstock.batching.sampler._packing import SampleCosts
from penstock.batching.sampler._sampler import BalancedBatchSampler

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
