"""Traversals of graphs whose lists are tables, in memory or in files, on one rank or several."""

from penstock.traversal._bfs import bfs
from penstock.traversal._components import connected_components
from penstock.traversal._costs import KhopCosts, khop_costs
from penstock.traversal._graph import CSRGraph
from penstock.traversal._inference import infer_layers
from penstock.traversal._khop import Closure, ClosureSize, count_khop, khop, split_khop
from penstock.traversal._node_sets import NodeSet, khop_nodes
from penstock.traversal._pagerank import pagerank
from penstock.traversal._rank_graph import RankGraph, RankGraphReport
from penstock.traversal._sampler import Neighborhood, NeighborSampler

__all__ = [
    "CSRGraph",
    "Closure",
    "ClosureSize",
    "KhopCosts",
    "NeighborSampler",
    "Neighborhood",
    "NodeSet",
    "RankGraph",
    "RankGraphReport",
    "bfs",
    "connected_components",
    "count_khop",
    "infer_layers",
    "khop",
    "khop_costs",
    "khop_nodes",
    "pagerank",
    "split_khop",
]
