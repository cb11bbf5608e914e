"""A layer's graph argument: a `Graph`, or the tensors that one is made from, remembered.

Making a graph costs far more than a layer, so the last one is kept as long as the tensors that it
was made from are the same, unchanged ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.rgnn._graph import Graph


class LastGraph:
    """The graph that was made last, with what it was made from. Copies and pickles start empty."""

    def __init__(self) -> None:
        self._made_from: tuple[Any, ...] = ()
        self._graph: Graph | None = None

    def get(
        self, tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...], make: Callable[[], Graph]
    ) -> Graph:
        """The last graph if it was made from these, else what `make` returns."""
        if any(tensor.is_inference() for tensor in tensors):
            return make()  # such tensors do not count their changes
        versions = tuple(tensor._version for tensor in tensors)
        key = (numbers, versions, len(tensors))
        if self._graph is not None and self._made_from[0] == key:
            known = [reference() for reference in self._made_from[1]]
            if all(one is other for one, other in zip(known, tensors, strict=True)):
                return self._graph
        self._graph = make()
        self._made_from = (key, [weakref.ref(tensor) for tensor in tensors])
        return self._graph

    def __reduce__(self) -> tuple[Any, ...]:
        return (LastGraph, ())


def as_graph(
    last: LastGraph,
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
    return last.get(
        (edge_index, edge_type),
        (num_nodes, num_relations),
        lambda: Graph(edge_index, edge_type, num_nodes=num_nodes, num_relations=num_relations),
    )


def glorot_(weight: torch.Tensor | None) -> None:
    """Glorot's uniform initialisation over the last two axes, for weights with any axes before."""
    if weight is not None:
        bound = (6 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
