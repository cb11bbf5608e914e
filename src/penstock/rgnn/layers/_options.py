"""Options of PyG's layers that are taken only at their defaults, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Refuse options of PyG's `MessagePassing` that are not what a layer does anyway.

    Raises:
        TypeError: PyG has no such option.
        ValueError: Only its default is supported.
    """
    for name, value in given.items():
        if name not in _MESSAGE_PASSING:
            raise TypeError(f"{layer} got an unexpected keyword argument {name!r}")
        supported, remedy = _MESSAGE_PASSING[name]
        if value not in supported:
            instead = remedy or f". {OTHERWISE}"
            raise ValueError(
                f"{name}={value!r} is not supported by {layer}, only {supported[0]!r}{instead}"
            )


def check_channels(layer: str, in_channels: Any) -> None:
    """Refuse the pair of channels that PyG takes for two sets of nodes.

    Raises:
        TypeError: It is no number.
    """
    if not isinstance(in_channels, int):
        raise TypeError(
            f"in_channels of {layer} must be one number, for one set of nodes; got "
            f"{in_channels!r}. Put two sets of nodes one after another, with features of one length"
        )


def shape_weight(
    sizes: Mapping[str, int], num_relations: int, num_bases: int | None, num_blocks: int | None
) -> tuple[int, ...]:
    """Return the shape of a layer's weight: one matrix per relation, per basis, or in blocks.

    Args:
        sizes: Rows and columns of a matrix, by the names that an error gives them.
        num_relations: Number of relations.
        num_bases: Number of bases that weights are sums of, or None.
        num_blocks: Number of blocks that weights are made of, or None.

    Raises:
        ValueError: Both bases and blocks are asked for, or a size does not divide into blocks.
    """
    if num_bases is not None and num_blocks is not None:
        raise ValueError("num_bases and num_blocks exclude each other; give one of them")
    if num_blocks is None:
        return (num_relations if num_bases is None else num_bases, *sizes.values())
    if any(size % num_blocks for size in sizes.values()):
        named = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{named} must be multiples of num_blocks {num_blocks}")
    return (num_relations, num_blocks, *(size // num_blocks for size in sizes.values()))
