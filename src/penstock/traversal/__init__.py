"""Traversals of graphs whose lists are tables, in memory or in files."""

from penstock.traversal._costs import KhopCosts, khop_costs
from penstock.traversal._graph import CSRGraph
from penstock.traversal._khop import Closure, ClosureSize, count_khop, khop, split_khop
from penstock.traversal._node_sets import NodeSet, khop_nodes
from penstock.traversal._sampler import Neighborhood, NeighborSampler

__all__ = [
    "CSRGraph",
    "Closure",
    "ClosureSize",
    "KhopCosts",
    "NeighborSampler",
    "Neighborhood",
    "NodeSet",
    "count_khop",
    "khop",
    "khop_costs",
    "khop_nodes",
    "split_khop",
]
