"""Graphs with typed edges: their indices, the formats that they come in, their statistics."""

from penstock.rgnn.graph._formats import EdgeType, GraphNames, check_integers, join_types
from penstock.rgnn.graph._graph import (
    Graph,
    GraphStats,
    find_graph,
    remember_graph,
    split_graph,
)
from penstock.rgnn.graph._indices import GraphTensors, build_once, compute_offsets, dtype_for

__all__ = [
    "EdgeType",
    "Graph",
    "GraphNames",
    "GraphStats",
    "GraphTensors",
    "build_once",
    "check_integers",
    "compute_offsets",
    "dtype_for",
    "find_graph",
    "join_types",
    "remember_graph",
    "split_graph",
]
