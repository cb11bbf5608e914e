"""Dynamic batching: irregular computations in few calls of ordinary modules."""

from penstock.batching.dynamic._batcher import DynamicBatcher as DynamicBatcher
from penstock.batching.dynamic._outputs import BatchedOutputs as BatchedOutputs
from penstock.batching.dynamic._outputs import BatchReport as BatchReport
from penstock.batching.dynamic._schedule import BatchSchedule as BatchSchedule
from penstock.batching.dynamic._schedule import schedule as schedule
from penstock.batching.dynamic._typed_graph import TypedGraph as TypedGraph
