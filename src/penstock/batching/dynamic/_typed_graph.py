"""One irregular computation as a graph: cells, their arguments and their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from penstock.batching.dynamic._node_graph import NodeGraph

_NUMBERS = (int, float, complex, np.generic)  # these cannot change in place

Signature = tuple[Hashable, int, int]
"""Operator type, number of arguments, number of inputs: nodes that share it run in one batch."""


class TypedGraph:
    """A computation over typed nodes, each of which reads the outputs of earlier ones.

    A graph is built once, node by node or from arrays, and may be run any number of times; its
    shape is analysed on first use. Tensors and arrays that are inputs are read in every run, with
    their values at that time.

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
        self._numbers: dict[int, list[Tensor | None]] = {}
        self._arrays: dict[int, list[tuple[Tensor, Tensor | None]]] | None = None
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
            arguments: For each node the earlier nodes with the operands of its cell.
            inputs: For each type with inputs, one tensor per input, with a row for each node of
                the type in their order: `[nodes of the type, ...]`.

        Raises:
            ValueError: Lengths differ, or inputs do not fit the nodes of their type.
        """
        if len(types) != len(arguments):
            raise ValueError(
                f"arguments must have one entry per node, {len(types)}; got {len(arguments)}"
            )
        columns_of = _read_columns(types, inputs or {})
        graph = cls()
        places: dict[int, list[int]] = {}
        seen: dict[Hashable, int] = {}
        for kind, reads in zip(types, arguments, strict=True):
            graph._add(kind, reads, len(columns_of.get(kind, ())))
            place = seen[kind] = seen.get(kind, -1) + 1
            places.setdefault(graph._codes[-1], []).append(place)
        kinds = {code: kind for (kind, _, _), code in graph._signatures.items()}
        graph._arrays = {
            code: [
                (tensor, None if len(chosen) == len(tensor) else torch.tensor(chosen))
                for tensor in columns_of.get(kinds[code], ())
            ]
            for code, chosen in places.items()
        }
        return graph

    def add(self, kind: Hashable, *arguments: int, inputs: Sequence[Any] = ()) -> int:
        """Add a node.

        Args:
            kind: Operator type: the key of its cell.
            arguments: Nodes that were added before; their outputs are operands of the cell.
            inputs: Further operands of the cell: numbers, or tensors without the batch axis.
                Python's floats become torch's default type.

        Returns:
            The number of the node.

        Raises:
            ValueError: An argument is no earlier node.
        """
        if self._nodes is not None or self._arrays is not None:
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
        """Signatures in the order of the types of `nodes`."""
        return list(self._signatures)

    @property
    def nodes(self) -> NodeGraph:
        """The nodes and their arguments, as arrays."""
        if self._nodes is None:
            self._nodes = NodeGraph.of(self._codes, self._arguments)
        return self._nodes

    @property
    def key(self) -> bytes:
        """A digest of the nodes, equal for graphs that differ in the meaning of signatures only."""
        if self._key is None:
            digest = hashlib.blake2b(digest_size=16)
            for array in (self.nodes.types, self.nodes.starts, self.nodes.flat):
                digest.update(array.tobytes())
            self._key = digest.digest()
        return self._key

    @property
    def has_whole_inputs(self) -> bool:
        """True if `inputs` are the tensors of the caller, not copies."""
        if self._arrays is None:
            return False
        return all(rows is None for columns in self._arrays.values() for _, rows in columns)

    @property
    def inputs(self) -> dict[int, tuple[Tensor, ...]]:
        """The current inputs of the nodes of each signature, by its number: `[nodes, ...]`."""
        if self._arrays is not None:
            return {
                code: tuple(
                    tensor if rows is None else tensor.index_select(0, rows.to(tensor.device))
                    for tensor, rows in columns
                )
                for code, columns in self._arrays.items()
            }
        return {code: tuple(self._stack_columns(code)) for code in self._rows}

    def _stack_columns(self, code: int) -> list[Tensor]:
        """Stack the inputs of a signature's nodes; columns of numbers only once."""
        columns = list(zip(*self._rows[code], strict=True))
        known = self._numbers.get(code)
        num_rows = len(self._rows[code])
        if known is None or any(each is not None and len(each) != num_rows for each in known):
            known = self._numbers[code] = [
                _stack(column) if all(isinstance(each, _NUMBERS) for each in column) else None
                for column in columns
            ]
        return [
            _stack(column) if stacked is None else stacked
            for column, stacked in zip(columns, known, strict=True)
        ]

    def _add(self, kind: Hashable, arguments: Sequence[int], num_inputs: int) -> None:
        signature = (kind, len(arguments), num_inputs)
        self._codes.append(self._signatures.setdefault(signature, len(self._signatures)))
        self._arguments.append(arguments)


def _stack(values: Sequence[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def _read_columns(
    types: Sequence[Hashable], inputs: Mapping[Hashable, Tensor | Sequence[Tensor]]
) -> dict[Hashable, tuple[Tensor, ...]]:
    """Check that the inputs of each type have a row for each of its nodes."""
    columns = {
        kind: (each,) if isinstance(each, Tensor) else tuple(each) for kind, each in inputs.items()
    }
    for kind, tensors in columns.items():
        count = sum(each == kind for each in types)
        for tensor in tensors:
            if tensor.shape[:1] != (count,):
                raise ValueError(
                    f"inputs of {kind!r} must have one row for each of its {count} nodes; "
                    f"got shape {tuple(tensor.shape)}"
                )
    return columns
