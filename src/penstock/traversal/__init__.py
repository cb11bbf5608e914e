"""Traversals of graphs whose lists are tables, in memory or in files."""

from penstock.traversal._graph import CSRGraph
from penstock.traversal._khop import Closure, ClosureSize, count_khop, khop, split_khop
from penstock.traversal._sampler import Neighborhood, NeighborSampler

__all__ = [
    "CSRGraph",
    "Closure",
    "ClosureSize",
    "NeighborSampler",
    "Neighborhood",
    "count_khop",
    "khop",
    "split_khop",
]
