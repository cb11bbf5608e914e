"""Dynamic batching: irregular computations in few calls of ordinary modules."""

from penstock.batching.dynamic._batcher import DynamicBatcher
from penstock.batching.dynamic._outputs import BatchedOutputs, BatchReport
from penstock.batching.dynamic._schedule import BatchSchedule, schedule
from penstock.batching.dynamic._typed_graph import TypedGraph

__all__ = [
    "BatchReport",
    "BatchSchedule",
    "BatchedOutputs",
    "DynamicBatcher",
    "TypedGraph",
    "schedule",
]
