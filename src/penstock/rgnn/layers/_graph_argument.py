"""A layer's graph argument: a `Graph`, or the tensors that one is made from."""

from __future__ import annotations

import torch
from torch import nn

from penstock.rgnn.graph import Graph, GraphTensors, check_integers, find_graph


def as_graph(
    edge_index: torch.Tensor | Graph,
    edge_type: torch.Tensor | None,
    *,
    num_nodes: int,
    num_relations: int,
) -> Graph:
    """Return the graph of a call `(x, edge_index, edge_type)` or `(x, graph)`.

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
    return find_graph(GraphTensors(edge_index, edge_type, None, num_nodes, num_relations, 1))


def num_rows(x: torch.Tensor) -> int:
    """Return the number of nodes that have features.

    Raises:
        TypeError: `x` is no tensor, such as PyG's pair of sources and targets.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"x must be one tensor with a row for each node; got {type(x).__name__}. Put two sets "
            f"of nodes one after another"
        )
    return x.shape[0]


def check_entities(entities: torch.Tensor, num_entities: int, num_nodes: int) -> None:
    """Refuse integers that do not say for each node which entity it is.

    Raises:
        TypeError: They are no integers.
        ValueError: There is none for a node, or it is out of range; on the CPU only, where looking
            at them waits for nothing.
    """
    check_integers("x, if it has no features,", entities)
    if entities.shape != (num_nodes,):
        raise ValueError(
            f"x of integers must have shape ({num_nodes},), one entity for each node of the graph; "
            f"got {tuple(entities.shape)}"
        )
    if entities.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return
    if entities.numel():
        low, high = (int(bound) for bound in torch.aminmax(entities))
        if low < 0 or high >= num_entities:
            raise ValueError(
                f"x holds {low if low < 0 else high}, but the layer has weights for in_channels="
                f"{num_entities} entities, from 0 on"
            )


def glorot_(weight: torch.Tensor | None) -> None:
    """Initialise weights uniformly as Glorot does, over the last two axes."""
    if weight is not None:
        bound = (6 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
