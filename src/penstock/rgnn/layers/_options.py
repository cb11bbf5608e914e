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
