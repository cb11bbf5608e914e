"""Relational graph neural networks, compiled to the graph at hand."""

from penstock.rgnn import layers
from penstock.rgnn._backends import BACKENDS
from penstock.rgnn._compile import CompiledFunction, compile
from penstock.rgnn._explain import Explanation
from penstock.rgnn._formats import GraphNames
from penstock.rgnn._functions import (
    combine,
    concat,
    dot,
    edge_mean,
    edge_softmax,
    exp,
    leaky_relu,
    log,
    relu,
    sigmoid,
    tanh,
)
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import REWRITES
from penstock.rgnn._stats import GraphStats
from penstock.rgnn._where import TraceError
from penstock.rgnn.layers import HGTConv, RGATConv, RGCNConv

__all__ = [
    "BACKENDS",
    "REWRITES",
    "CompiledFunction",
    "Explanation",
    "Graph",
    "GraphNames",
    "GraphStats",
    "HGTConv",
    "RGATConv",
    "RGCNConv",
    "TraceError",
    "combine",
    "compile",
    "concat",
    "dot",
    "edge_mean",
    "edge_softmax",
    "exp",
    "layers",
    "leaky_relu",
    "log",
    "relu",
    "sigmoid",
    "tanh",
]
