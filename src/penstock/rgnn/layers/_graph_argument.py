"""A layer's graph argument: a `Graph`, or the tensors that one is made from."""

from __future__ import annotations

import torch
from torch import nn

from penstock.rgnn._graph import Graph
from penstock.rgnn._graph_tensors import GraphTensors, graph_of


def as_graph(
    edge_index: torch.Tensor | Graph,
    edge_type: torch.Tensor | None,
    *,
    num_nodes: int,
    num_relations: int,
) -> Graph:
    """The graph of a call `(x, edge_index, edge_type)` or `(x, graph)`.

    Raises:
        ValueError: The graph's relations are not the layer's.
        TypeError: `edge_type` is missing, or given beside a graph.
    """
    if isinstance(edge_index, Graph):
        if edge_type is not None:
            raise TypeError("edge_type is part of the graph; leave it out")
        if edge_index.num_relations != num_relations:
            raise ValueError(
                f"the graph has {edge_index.num_relations} relations and the layer "
                f"{num_relations}; give both the same num_relations"
            )
        return edge_index
    if edge_type is None:
        raise TypeError("edge_type is missing: one relation for each edge, or pass a Graph")
    return graph_of(GraphTensors(edge_index, edge_type, None, num_nodes, num_relations, 1))


def num_rows(x: torch.Tensor) -> int:
    """The number of nodes that features are for.

    Raises:
        TypeError: `x` is no tensor, such as PyG's pair of sources and targets.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"x must be one tensor with a row for each node; got {type(x).__name__}. Put two sets "
            f"of nodes one after another"
        )
    return x.shape[0]


def glorot_(weight: torch.Tensor | None) -> None:
    """Glorot's uniform initialisation over the last two axes, for weights with any axes before."""
    if weight is not None:
        bound = (6 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
