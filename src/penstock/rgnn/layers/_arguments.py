"""Arguments that layers share: graphs, rows of nodes, shapes of weights, and options of PyG's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.rgnn.graph import Graph, GraphTensors, check_integers, find_graph
from penstock.units import parse_count

OTHERWISE = "Write the layer with penstock.rgnn.compile, or use PyG's"
_MESSAGE_PASSING = {
    "aggr": (("add", "sum"), ""),
    "aggr_kwargs": ((None, {}), ""),
    "flow": (("source_to_target",), "; pass edge_index.flip(0)"),
    "node_dim": ((0, -2), ""),
    "decomposed_layers": ((1,), ""),
}
"""Keyword arguments of PyG's `MessagePassing`: what each may be here, and what to do instead."""


def check_message_passing(layer: str, given: Mapping[str, Any]) -> None:
    """Refuse options of PyG's `MessagePassing` that are not what a layer does anyway."""
    for name, value in given.items():
        if name not in _MESSAGE_PASSING:
            raise TypeError(f"{layer} got an unexpected keyword argument {name!r}")
        supported, remedy = _MESSAGE_PASSING[name]
        if value not in supported:
            instead = remedy or f". {OTHERWISE}"
            raise ValueError(
                f"{name}={value!r} is not supported by {layer}, only {supported[0]!r}{instead}"
            )


def parse_channels(layer: str, in_channels: Any) -> int:
    """Return the number of channels; refuse the pair that PyG takes for two sets of nodes."""
    if isinstance(in_channels, tuple | list):
        raise TypeError(
            f"in_channels of {layer} must be one number, for one set of nodes; got "
            f"{in_channels!r}. Put two sets of nodes one after another, with features of one length"
        )
    return parse_count(in_channels, name="in_channels")


def parse_optional(value: Any, name: str, least: int = 0) -> int | None:
    """Return a whole number, or None if none is given."""
    return None if value is None else parse_count(value, name=name, least=least)


def shape_weight(
    sizes: Mapping[str, int], num_relations: int, num_bases: int | None, num_blocks: int | None
) -> tuple[int, ...]:
    """Return the shape of a layer's weight: one matrix per relation, per basis, or in blocks."""
    if num_bases is not None and num_blocks is not None:
        raise ValueError("num_bases and num_blocks exclude each other; give one of them")
    if num_blocks is None:
        return (num_relations if num_bases is None else num_bases, *sizes.values())
    if any(size % num_blocks for size in sizes.values()):
        named = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{named} must be multiples of num_blocks {num_blocks}")
    return (num_relations, num_blocks, *(size // num_blocks for size in sizes.values()))


def as_graph(
    edge_index: torch.Tensor | Graph,
    edge_type: torch.Tensor | None,
    *,
    num_nodes: int,
    num_relations: int,
) -> Graph:
    """Return the graph of a call `(x, edge_index, edge_type)` or `(x, graph)`."""
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
    """Return the number of nodes that have features."""
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
    is_readable = entities.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    if is_readable and entities.numel():
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
