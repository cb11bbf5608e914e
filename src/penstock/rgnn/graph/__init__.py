"""Graphs with typed edges: their indices, the formats that they come in, their statistics."""

from penstock.rgnn.graph._formats import GraphNames, check_ends, check_integers
from penstock.rgnn.graph._graph import Graph
from penstock.rgnn.graph._indices import dtype_for, offsets_of
from penstock.rgnn.graph._stats import GraphStats
from penstock.rgnn.graph._tensors import GraphTensors, graph_of, remembered, tensors_of

__all__ = [
    "Graph",
    "GraphNames",
    "GraphStats",
    "GraphTensors",
    "check_ends",
    "check_integers",
    "dtype_for",
    "graph_of",
    "offsets_of",
    "remembered",
    "tensors_of",
]
