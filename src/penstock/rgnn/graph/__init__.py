"""Graphs with typed edges: their indices, the formats that they come in, their statistics."""

from penstock.rgnn.graph._build_once import build_once
from penstock.rgnn.graph._formats import GraphNames, check_ends, check_integers
from penstock.rgnn.graph._graph import Graph
from penstock.rgnn.graph._indices import compute_offsets, dtype_for
from penstock.rgnn.graph._stats import GraphStats
from penstock.rgnn.graph._tensors import GraphTensors, find_graph, remember_graph, split_graph

__all__ = [
    "Graph",
    "GraphNames",
    "GraphStats",
    "GraphTensors",
    "build_once",
    "check_ends",
    "check_integers",
    "compute_offsets",
    "dtype_for",
    "find_graph",
    "remember_graph",
    "split_graph",
]
