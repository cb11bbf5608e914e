"""Relational graph neural networks, compiled to the graph at hand."""

from penstock.rgnn import layers
from penstock.rgnn._compile import CompiledFunction, compile
from penstock.rgnn._explain import Explanation
from penstock.rgnn.backends import BACKENDS
from penstock.rgnn.frontend.errors import TraceError
from penstock.rgnn.frontend.functions import (
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
from penstock.rgnn.graph import Graph, GraphNames, GraphStats
from penstock.rgnn.layers import HGTConv, RGATConv, RGCNConv
from penstock.rgnn.passes import REWRITES

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
