"""One irregular computation as a graph: cells, their arguments and their inputs.

Its nodes are arrays. Many small graphs together are one graph. For each node v and type t

    ahead(v, t) = [type(v) = t] + max over readers r of v of ahead(r, t)

is the number of batches of type t that are still to come in any order.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from penstock._lazy import cached_property
from penstock.batching._arrays import Integers
from penstock.compat.autograd import outside_inference_mode

_NUMBERS = (int, float, complex, np.generic)  # these cannot change in place

Signature = tuple[Hashable, int, int]
"""Operator type, number of arguments, number of inputs: nodes that share it run in one batch."""


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """Types and arguments of nodes: node v reads `flat[starts[v]:starts[v + 1]]`.

    Example:
        >>> graph = NodeGraph.of([0, 0, 1], [[], [], [0, 1]])
        >>> graph.num_nodes, graph.ahead.tolist()
        (3, [[1, 1, 2], [1, 1, 2], [0, 1, 1]])
    """

    types: Integers
    """Type of every node, `[num_nodes]`: 0 and up."""
    starts: Integers
    """First argument of every node in `flat`, `[num_nodes + 1]`."""
    flat: Integers
    """The arguments of all nodes, `[num_arguments]`; every one is an earlier node."""
    num_types: int

    @classmethod
    def of(cls, types: Sequence[int], arguments: Iterable[Sequence[int]]) -> NodeGraph:
        """Build and check a graph from lists as `schedule` takes them."""
        codes = np.asarray(types if len(types) else np.zeros(0, dtype=np.int64))
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise TypeError(
                f"types must be whole numbers, one per node; got dtype {codes.dtype} and shape "
                f"{codes.shape}"
            )
        lists = list(arguments)
        if len(lists) != len(codes):
            raise ValueError(
                f"arguments must have one entry per node, {len(codes)}; got {len(lists)}"
            )
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        flat = np.array(list(chain.from_iterable(lists)) or np.zeros(0, dtype=np.int64))
        if flat.dtype.kind not in "iu":
            raise TypeError(f"arguments must be whole numbers; got dtype {flat.dtype}")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        graph = cls(
            codes.astype(np.int64),
            starts,
            flat.astype(np.int64),
            int(codes.max(initial=-1)) + 1,
        )
        graph.check()
        return graph

    @classmethod
    def merge(cls, graphs: Sequence[NodeGraph], num_types: int) -> NodeGraph:
        """Join graphs into one."""
        firsts = np.cumsum([0, *(graph.num_nodes for graph in graphs)])
        counts = np.array([len(graph.flat) for graph in graphs], dtype=np.int64)
        starts = np.zeros(int(firsts[-1]) + 1, dtype=np.int64)
        np.cumsum(np.concatenate([graph.num_arguments for graph in graphs]), out=starts[1:])
        flat = np.concatenate([graph.flat for graph in graphs]) + np.repeat(firsts[:-1], counts)
        return cls(np.concatenate([graph.types for graph in graphs]), starts, flat, num_types)

    def check(self) -> None:
        """Raise ValueError if a type is negative or an argument is no earlier node."""
        if len(self.types) and self.types.min() < 0:
            node = int(self.types.argmin())
            raise ValueError(f"types must be >= 0; node {node} has {self.types[node]}")
        readers = self.readers_flat
        wrong = np.flatnonzero((self.flat < 0) | (self.flat >= readers))
        if len(wrong):
            node, argument = readers[wrong[0]], self.flat[wrong[0]]
            raise ValueError(
                f"arguments must be earlier nodes; node {node} reads node {argument}, which does "
                "not come before it: number the nodes so that each comes after its arguments (in "
                "a cycle none can)"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.types)

    @cached_property
    def lower_bound(self) -> int:
        """Least number of batches of any schedule (ED-Batch, arXiv 2302.03851, section 2.2)."""
        return int(self.ahead[:, :-1].max(axis=0, initial=0).sum())

    @cached_property
    def num_arguments(self) -> Integers:
        """Arguments per node, `[num_nodes]`."""
        return np.diff(self.starts)

    @cached_property
    def readers_flat(self) -> Integers:
        """The node that reads each entry of `flat`, `[num_arguments]`."""
        return np.repeat(np.arange(self.num_nodes), self.num_arguments)

    @cached_property
    def ahead(self) -> Integers:
        """Most nodes of each type on one path from a node on, itself included.

        The last column counts nodes of any type: `[num_nodes, num_types + 1]`.
        """
        own = np.eye(self.num_types, self.num_types + 1, dtype=np.int64)[self.types]
        own[:, -1] = 1
        ahead, readers = own.copy(), self.readers_flat
        level = self.depth[readers]
        from_last = np.lexsort((self.flat, -level))
        for edges in np.split(from_last, np.flatnonzero(np.diff(level[from_last])) + 1):
            begins = np.flatnonzero(np.diff(self.flat[edges], prepend=-1))
            most = np.maximum.reduceat(ahead[readers[edges]], begins, axis=0)
            arguments = self.flat[edges[begins]]
            ahead[arguments] = np.maximum(ahead[arguments], most + own[arguments])
        return ahead

    @cached_property
    def depth(self) -> Integers:
        """Nodes on the longest path up to a node, itself excluded: `[num_nodes]`."""
        depth: list[int] = []
        flat = self.flat.tolist()
        for first, last in pairwise(self.starts.tolist()):
            depth.append(1 + max(map(depth.__getitem__, flat[first:last]), default=-1))
        return np.array(depth, dtype=np.int64)


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
                (tensor, None if len(chosen) == len(tensor) else torch.tensor(chosen, device="cpu"))
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
            TypeError: An argument is no number, or `inputs` no list.
            ValueError: An argument is no earlier node.
        """
        if "nodes" in self.__dict__ or self._arrays is not None:
            raise ValueError("the graph has been run or made from arrays: no node can be added")
        if not isinstance(inputs, Sequence) or isinstance(inputs, str):
            raise TypeError(
                f"inputs must be a list with an entry for each operand; got {type(inputs).__name__}"
            )
        node, reads = len(self._codes), [_read_node(each) for each in arguments]
        for argument in reads:
            if not 0 <= argument < node:
                raise ValueError(
                    f"arguments must be nodes added before; node {node} reads {argument}"
                )
        self._add(kind, reads, len(inputs))
        if inputs:
            self._rows.setdefault(self._codes[-1], []).append(tuple(inputs))
        return node

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def signatures(self) -> list[Signature]:
        """Signatures in the order of the types of `nodes`."""
        return list(self._signatures)

    @cached_property
    def nodes(self) -> NodeGraph:
        """The nodes and their arguments, as arrays."""
        return NodeGraph.of(self._codes, self._arguments)

    @cached_property
    def key(self) -> bytes:
        """A digest of the nodes, equal for graphs that differ in the meaning of signatures only."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.nodes.types, self.nodes.starts, self.nodes.flat):
            digest.update(array.tobytes())
        return digest.digest()

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
        kinds = [kind for kind, _, _ in self._signatures]
        found: dict[int, tuple[Tensor, ...]] = {}
        for code in self._rows:
            with note_inputs_of(kinds[code]):
                found[code] = tuple(self._stack_columns(code))
        return found

    def _stack_columns(self, code: int) -> list[Tensor]:
        """Stack the inputs of a signature's nodes; columns of numbers only once."""
        columns = list(zip(*self._rows[code], strict=True))
        known = self._numbers.get(code)
        num_rows = len(self._rows[code])
        if known is None or any(each is not None and len(each) != num_rows for each in known):
            with outside_inference_mode():  # they are kept for runs with gradients, too
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


@contextmanager
def note_inputs_of(kind: Hashable) -> Iterator[None]:
    """Name the type of nodes whose inputs do not fit together."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        error.add_note(f"raised where inputs of nodes of type {kind!r} are joined")
        raise


def _read_node(argument: Any) -> int:
    try:
        return operator.index(argument)
    except TypeError:
        raise TypeError(
            f"arguments must be numbers of nodes; got {argument!r}: pass several one after the "
            "other, as add(kind, *nodes)"
        ) from None


def _stack(values: Sequence[Any]) -> Tensor:
    device = next((each.device for each in values if isinstance(each, Tensor)), None)
    if device is not None:  # numbers among tensors are tensors, too: these keep their gradients
        return torch.stack(
            [
                each if isinstance(each, Tensor) else torch.as_tensor(each, device=device)
                for each in values
            ]
        )
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values, device="cpu")


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
