"""A rank's own step: the operators of a partitioned step on the rank's pieces, and collectives.

The partition says for each operator which axis is split, and for each storage how it rests. So the
rank's step is written operator by operator: operands are brought into the placement that the
operator's split asks for, the operator runs on them, and its results are brought to rest. It is a
step graph like any other; its collectives are `torch.ops._c10d_functional`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.graph.executable import make_executable
from penstock.graph.step_graph import Operator, StepGraph, Storage, map_views
from penstock.partitioner._collective_operators import WRITTEN_OUT
from penstock.partitioner._operator_call import OperatorCall
from penstock.partitioner._operators import adapt_arguments
from penstock.partitioner._partition import Partition
from penstock.partitioner._rank_builder import RankExchange
from penstock.partitioner._rank_storages import RankStorages
from penstock.partitioner._split import find_live_ranges


class RankStep(NamedTuple):
    """A rank's step.

    Attributes:
        graph: The step graph.
        exchanges: Its collectives, in order.
        peak_device_bytes: Bytes that it holds at its fullest operator.
    """

    graph: StepGraph
    exchanges: tuple[RankExchange, ...]
    peak_device_bytes: int


def write_rank(
    graph: StepGraph, partition: Partition, coordinates: tuple[int, ...], groups: tuple[str, ...]
) -> RankStep:
    """Return the step of one rank.

    Args:
        graph: The step of all devices.
        partition: Its partition.
        coordinates: The rank's, at each level of the mesh.
        groups: For each level the name of the process group of the ranks with the same coordinates
            at the other levels.

    Raises:
        PlanError: An operator cannot run on pieces; the message names it (rule `"operator"`), or
            the partition is for another graph (rule `"graph"`).
    """
    if partition.graph_digest != graph.digest:
        raise PlanError("the partition is for another step graph", rule="graph")
    storages = RankStorages(graph, partition, coordinates, groups)
    builder = storages.builder
    for index, storage in enumerate(graph.storages):
        if storage.initial is not None:
            storages.add_initial(index, storage.initial)
    for index, operator in enumerate(graph.operators):
        builder.source = index, operator.name, operator.phase, operator.module
        _write(storages, index, operator)
        storages.last_written.append(len(builder.operators) - 1)
    storages.set_lasting()
    tensors = {name: storages.rest_view(view) for name, view in graph.tensors.items()}
    made = StepGraph(
        storages=tuple(builder.storages),
        storage_of_value=tuple(builder.storage_of_value),
        operators=tuple(builder.operators),
        loss=None if graph.loss is None else storages.rest_view(graph.loss),
        device=graph.device,
        tensors=tensors,
        guards=tuple(
            (map_views(storages.rest_view, expression), outcome)
            for expression, outcome in graph.guards
        ),
        metadata=graph.metadata,
        captured=graph.captured,
    )
    made = make_executable(made)
    peak = _count_peak(made, builder.storages)  # not rounded up
    return RankStep(made, tuple(builder.exchanges), peak)


def find_peak(graph: StepGraph, partition: Partition) -> int | None:
    """Return the bytes that the first rank holds at its fullest operator, copies for collectives
    included; None if its step cannot be written.
    """
    num_levels = len(partition.mesh)
    try:
        step = write_rank(graph, partition, (0,) * num_levels, ("",) * num_levels)
    except PlanError as error:
        if error.rule == "graph":
            raise
        return None
    except ValueError:  # this torch has not all operators of a graph that was loaded
        return None
    return step.peak_device_bytes


def _count_peak(graph: StepGraph, storages: list[Storage]) -> int:
    """Return the most bytes of storages and workspace, operator by operator."""
    first, last = find_live_ranges(graph)
    change = np.zeros(len(graph.operators) + 1, dtype=np.int64)
    num_bytes = [each.num_bytes for each in storages]
    np.add.at(change, first, num_bytes)
    np.subtract.at(change, last, num_bytes)
    workspace = np.array([each.workspace_bytes for each in graph.operators], dtype=np.int64)
    return int((np.cumsum(change)[:-1] + workspace).max(initial=0))


def _write(storages: RankStorages, index: int, operator: Operator) -> None:
    call = OperatorCall(storages, index, operator)
    write_out = WRITTEN_OUT.get(call.name)
    if write_out is not None and write_out(call):
        return
    args = tuple(call.operand_in(each) for each in operator.args)
    kwargs = {key: call.operand_in(each) for key, each in operator.kwargs.items()}
    outputs = call.declare_outputs()
    args, kwargs = adapt_arguments(call, args, kwargs, outputs)
    call.emit(operator.target, args, kwargs, outputs)
    call.average(outputs)
    call.put_to_rest()
