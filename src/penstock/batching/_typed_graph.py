"""One irregular computation as a graph: which cell runs where, on what, and on which inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from penstock.batching._node_graph import NodeGraph

Signature = tuple[Hashable, int, int]
"""Operator type, number of arguments, number of inputs: what can run in one batch."""


class TypedGraph:
    """A computation over typed nodes, each of which reads the outputs of earlier ones.

    A graph is built once, node by node or from arrays, and may be run any number of times; what
    batching has to know about it is computed on first use and kept.

    Example:
        >>> tree = TypedGraph()
        >>> words = [tree.add("leaf", inputs=[word]) for word in (4, 8)]
        >>> tree.add("node", *words)
        2
    """

    def __init__(self) -> None:
        self._signatures: dict[Signature, int] = {}
        self._codes: list[int] = []
        self._arguments: list[Sequence[int]] = []
        self._rows: dict[int, list[tuple[Any, ...]]] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] | None = None
        self._nodes: NodeGraph | None = None
        self._key: bytes | None = None

    @classmethod
    def from_arrays(
        cls,
        types: Sequence[Hashable],
        arguments: Sequence[Sequence[int]],
        inputs: Mapping[Hashable, Tensor | Sequence[Tensor]] | None = None,
    ) -> Self:
        """Build a graph from lists.

        Args:
            types: Operator type of each node.
            arguments: For each node the earlier nodes whose outputs its cell gets.
            inputs: For each type that takes any, one tensor per input, whose rows `[nodes of the
                type, ...]` belong to its nodes in their order.

        Raises:
            ValueError: lengths differ, or inputs do not fit the nodes of their type.
        """
        if len(types) != len(arguments):
            raise ValueError(
                f"arguments must have one entry per node, {len(types)}; got {len(arguments)}"
            )
        given = {
            kind: (each,) if isinstance(each, Tensor) else tuple(each)
            for kind, each in (inputs or {}).items()
        }
        for kind, tensors in given.items():
            count = sum(each == kind for each in types)
            for tensor in tensors:
                if tensor.shape[:1] != (count,):
                    raise ValueError(
                        f"inputs of {kind!r} must have one row for each of its {count} nodes; "
                        f"got shape {tuple(tensor.shape)}"
                    )
        graph = cls()
        places: dict[int, list[int]] = {}
        seen: dict[Hashable, int] = {}
        for kind, mine in zip(types, arguments, strict=True):
            graph._add(kind, mine, len(given.get(kind, ())))
            place = seen[kind] = seen.get(kind, -1) + 1
            places.setdefault(graph._codes[-1], []).append(place)
        kinds = {code: kind for (kind, _, _), code in graph._signatures.items()}
        graph._inputs = {
            code: tuple(
                tensor if len(chosen) == len(tensor) else tensor[chosen]
                for tensor in given.get(kinds[code], ())
            )
            for code, chosen in places.items()
        }
        return graph

    def add(self, kind: Hashable, *arguments: int, inputs: Sequence[Any] = ()) -> int:
        """Add a node.

        Args:
            kind: Operator type: the key of its cell.
            arguments: Nodes that were added before, whose outputs the cell gets.
            inputs: What the cell gets after them: numbers, or tensors without the batch axis.

        Returns:
            The number of the node.

        Raises:
            ValueError: an argument is no earlier node.
        """
        if self._inputs is not None:
            raise ValueError("the graph has been run or made from arrays: no node can be added")
        node = len(self._codes)
        for argument in arguments:
            if not 0 <= argument < node:
                raise ValueError(
                    f"arguments must be nodes added before; node {node} reads {argument!r}"
                )
        self._add(kind, arguments, len(inputs))
        if inputs:
            self._rows.setdefault(self._codes[-1], []).append(tuple(inputs))
        return node

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def signatures(self) -> list[Signature]:
        """What runs together, by the number that `nodes` gives it as its type."""
        return list(self._signatures)

    @property
    def nodes(self) -> NodeGraph:
        """The nodes and what they read, as arrays."""
        if self._nodes is None:
            self._nodes = NodeGraph.of(self._codes, self._arguments)
        return self._nodes

    @property
    def key(self) -> bytes:
        """The same for graphs that are the same but for their inputs."""
        if self._key is None:
            nodes = self.nodes
            digest = hashlib.blake2b(repr(self.signatures).encode(), digest_size=16)
            for array in (nodes.types, nodes.starts, nodes.flat):
                digest.update(array.tobytes())
            self._key = digest.digest()
        return self._key

    @property
    def inputs(self) -> dict[int, tuple[Tensor, ...]]:
        """For each signature's number the inputs of its nodes: `[nodes, ...]` each."""
        if self._inputs is None:
            self._inputs = {
                code: tuple(_stacked(column) for column in zip(*rows, strict=True))
                for code, rows in self._rows.items()
            }
        return self._inputs

    def _add(self, kind: Hashable, arguments: Sequence[int], num_inputs: int) -> None:
        signature = (kind, len(arguments), num_inputs)
        self._codes.append(self._signatures.setdefault(signature, len(self._signatures)))
        self._arguments.append(arguments)


def _stacked(values: Sequence[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return torch.from_numpy(np.asarray(values))
