"""Alignment of storages on a device: one rule for planners and for execution."""

from __future__ import annotations

import collections
import math

from penstock.graph.step_graph import StepGraph

# At such addresses torch gives tensors, by device; kernels may calculate otherwise elsewhere.
TENSOR_ALIGNMENT_BYTES = collections.defaultdict(lambda: 512, cpu=64)
# Direct file I/O takes such addresses without a copy.
_FILE_ALIGNMENT_BYTES = 512
# From this largest storage on, file I/O is worth more than the bytes between small storages.
_LARGE_BYTES = 2**16
# Of graphs with nothing larger that were not captured alignment would be most.
_SMALL_BYTES = 2**10
EXECUTABLE_MARK = "workspace_holds_results"  # in the metadata of graphs that can be executed


def alignment_bytes(graph: StepGraph) -> int:
    """Return the bytes that the addresses of a step's storages are multiples of.

    Example:
        >>> alignment_bytes(StepGraph(storages=(), storage_of_value=(), operators=()))
        512

    Args:
        graph: The step; where all of its storages are multiples of more, up to 512 bytes, that
            costs nothing and is taken.
    """
    sizes = [storage.num_bytes for storage in graph.storages]
    largest = max(sizes, default=0)
    if largest >= _LARGE_BYTES:
        return _FILE_ALIGNMENT_BYTES
    common = math.gcd(_FILE_ALIGNMENT_BYTES, *sizes)
    return max(common, least_alignment_bytes(graph))


def least_alignment_bytes(graph: StepGraph) -> int:
    """Return the alignment that tensors of torch have at least.

    Example:
        >>> least_alignment_bytes(StepGraph(storages=(), storage_of_value=(), operators=()))
        1

    Args:
        graph: The step; one whose storages are all below a kilobyte needs none, unless it was
            captured.
    """
    largest = max((storage.num_bytes for storage in graph.storages), default=0)
    needs_some = largest >= _SMALL_BYTES or EXECUTABLE_MARK in graph.metadata
    return TENSOR_ALIGNMENT_BYTES[graph.device] if needs_some else 1
