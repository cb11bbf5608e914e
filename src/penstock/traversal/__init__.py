"""Traversals of graphs whose lists are tables, in memory or in files."""

from penstock.traversal._bfs import bfs
from penstock.traversal._components import connected_components
from penstock.traversal._graph import CSRGraph
from penstock.traversal._pagerank import pagerank
from penstock.traversal._rank_graph import RankGraph, RankGraphReport
from penstock.traversal._sampler import Neighborhood, NeighborSampler

__all__ = [
    "CSRGraph",
    "NeighborSampler",
    "Neighborhood",
    "RankGraph",
    "RankGraphReport",
    "bfs",
    "connected_components",
    "pagerank",
]
