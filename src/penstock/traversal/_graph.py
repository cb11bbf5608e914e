"""A graph as two lists in any tier: where the neighbours of each node begin, and the neighbours.

In memory both lists are checked when the graph is made. In a file they are not read through for
that: what is damaged is noticed where it is met.
"""

from __future__ import annotations

import io
import os
import weakref
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from penstock.memory import NewFile
from penstock.traversal._lists import (
    as_list,
    check_bounds,
    check_edges,
    in_memory,
    narrow,
    read_entries,
)
from penstock.traversal._matrix_market import read_pattern
from penstock.unified import UnifiedTensor, unify
from penstock.units import parse_count

Flow = Literal["source_to_target", "target_to_source"]
_FLOWS = ("source_to_target", "target_to_source")


class CSRGraph:
    """A directed graph as the list of each node's neighbours, in memory or in files.

    The neighbours of node v are `indices[indptr[v]:indptr[v + 1]]`, in any order, each as often as
    there are edges. `flow` says, as in PyTorch Geometric, along which end of its edges a node finds
    them: with "source_to_target" they are the nodes from which an edge leads to v, those that send
    it messages; with "target_to_source" the nodes to which an edge leads from v.

    Example:
        >>> graph = CSRGraph([0, 2, 3, 3], [1, 2, 0])
        >>> graph.num_nodes, graph.num_edges
        (3, 3)

    Args:
        indptr: Integers of shape (num_nodes + 1,), int32 or int64, rising from 0 to num_edges: a
            tensor on the CPU, a NumPy array or a sequence, which is used as it is; a table of
            `penstock.unify`; or the path of a table in a file, of which only the entries that are
            needed are read.
        indices: Integers of shape (num_edges,) from 0 to num_nodes - 1, given in the same ways.
        flow: "source_to_target" or "target_to_source".
        edge_ids: Integers of shape (num_edges,), given in the same ways: ids of the edges, where
            those are not their places in `indices`.

    Attributes:
        indptr: List of shape (num_nodes + 1,).
        indices: List of shape (num_edges,).
        flow: Direction of messages along the edges.
        edge_ids: List of shape (num_edges,), or None.
        num_nodes: Nodes.
        num_edges: Edges.

    Raises:
        TypeError: A list is not int32 or int64 of one dimension, on the CPU.
        ValueError: The lists do not fit together, or `flow` is something else.
        StoreError: A file cannot be used.
    """

    def __init__(
        self, indptr: Any, indices: Any, *, flow: Flow = "source_to_target", edge_ids: Any = None
    ) -> None:
        self.indptr = as_list(indptr, "indptr")
        self.indices = as_list(indices, "indices")
        self.edge_ids = None if edge_ids is None else as_list(edge_ids, "edge_ids")
        self.flow: Flow = _check_flow(flow)
        if len(self.indptr) == 0:
            raise ValueError("indptr: expected shape (num_nodes + 1,), got no element")
        self.num_nodes, self.num_edges = len(self.indptr) - 1, len(self.indices)
        _check_offsets(self.indptr, self.num_edges)
        _check_nodes(self.indices, self.num_nodes)
        if self.edge_ids is not None and len(self.edge_ids) != self.num_edges:
            raise ValueError(
                f"edge_ids: expected one for each of {self.num_edges} edges, got "
                f"{len(self.edge_ids)}"
            )

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        *,
        flow: Flow = "source_to_target",
        edge_ids: bool = False,
    ) -> CSRGraph:
        """Return a graph that is given as pairs of nodes, as in PyTorch Geometric.

        Example:
            >>> edges = torch.tensor([[1, 2, 0], [0, 0, 1]])  # 1 -> 0, 2 -> 0, 0 -> 1
            >>> CSRGraph.from_edges(edges, 3).indices.tolist()
            [1, 2, 0]

        Args:
            edge_index: Integers of shape (2, num_edges); column e is an edge from node
                `edge_index[0, e]` to node `edge_index[1, e]`. An edge that is given twice is there
                twice. Edges of one node keep their order.
            num_nodes: Nodes of the graph.
            flow: See the class: whose neighbours a node has.
            edge_ids: Whether the graph keeps e as the id of each edge, in 4 or 8 bytes.

        Raises:
            TypeError: `edge_index` does not hold integers.
            ValueError: `edge_index` has another shape, or a node that the graph does not have.
        """
        count = parse_count(num_nodes, name="num_nodes")
        check_edges(edge_index, count)
        source, target = edge_index.cpu()
        neighbor, owner = (source, target) if _is_forward(flow) else (target, source)
        order = torch.argsort(owner, stable=True)
        return cls(
            narrow(_count_degrees(owner, count), len(order)),
            narrow(neighbor[order], count),
            flow=flow,
            edge_ids=narrow(order, len(order)) if edge_ids else None,
        )

    @classmethod
    def from_pyg(
        cls, data: Any, *, flow: Flow = "source_to_target", edge_ids: bool = False
    ) -> CSRGraph:
        """Return the graph of a `torch_geometric.data.Data`.

        Args:
            data: An object with `edge_index` and `num_nodes`; one type of nodes.
            flow: See the class: whose neighbours a node has.
            edge_ids: Whether the graph keeps the place of each edge in `data.edge_index`.

        Raises:
            TypeError: `data` has no `edge_index`, as heterogeneous data.
            ValueError: The edges make no graph.
        """
        edge_index = getattr(data, "edge_index", None)
        num_nodes = getattr(data, "num_nodes", None)
        if not isinstance(edge_index, Tensor) or num_nodes is None:
            raise TypeError(
                "data: expected an object with edge_index and num_nodes, such as "
                f"torch_geometric.data.Data, got {type(data).__name__}; give the edges of one type "
                "to CSRGraph.from_edges"
            )
        return cls.from_edges(edge_index, num_nodes, flow=flow, edge_ids=edge_ids)

    @classmethod
    def from_scipy(cls, matrix: Any, *, flow: Flow = "source_to_target") -> CSRGraph:
        """Return the graph of a sparse matrix: each stored entry (i, j) is an edge from i to j.

        The values of entries are not looked at. With "target_to_source" a matrix in CSR is used as
        it is, and the neighbours are those of `scipy.sparse.csgraph`; with "source_to_target" one
        in CSC is.

        Args:
            matrix: A square sparse matrix or array of SciPy.
            flow: See the class: whose neighbours a node has.

        Raises:
            TypeError: `matrix` is no sparse matrix.
            ValueError: `matrix` is not square.
        """
        shape = getattr(matrix, "shape", ())
        if not hasattr(matrix, "tocsr") or not hasattr(matrix, "tocsc"):
            raise TypeError(
                f"matrix: expected a sparse matrix of SciPy, got {type(matrix).__name__}"
            )
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"matrix: expected a square matrix, got shape {tuple(shape)}")
        is_forward = _is_forward(flow)
        if matrix.format == "coo":  # whose entries in one place SciPy would make one
            return cls.from_edges(_stack_entries(matrix), shape[0], flow=flow)
        stored = matrix.tocsc() if is_forward else matrix.tocsr()
        return cls(stored.indptr, stored.indices, flow=flow)

    @classmethod
    def from_matrix_market(
        cls, path: str | os.PathLike[str], *, flow: Flow = "source_to_target"
    ) -> CSRGraph:
        """Return the graph of a Matrix Market file: each entry (i, j) is an edge from i to j.

        Entries of a symmetric, skew-symmetric or Hermitian file are edges in both directions. Their
        values are not looked at.

        Args:
            path: Path of a file in coordinate format, which may end in ".gz".
            flow: See the class: whose neighbours a node has.

        Raises:
            ValueError: The file holds no square matrix in coordinate format; the message says what.
            OSError: The file cannot be read.
        """
        edge_index, num_nodes = read_pattern(Path(path))
        return cls.from_edges(edge_index, num_nodes, flow=flow)

    def reverse(self) -> CSRGraph:
        """Return the same edges as the lists of their other ends, in memory.

        Example:
            >>> CSRGraph([0, 2, 2, 3], [1, 2, 0]).reverse().indices.tolist()
            [2, 0, 0]

        Raises:
            ValueError: The graph, in a file, is damaged.
        """
        indptr, indices = (_load(each) for each in (self.indptr, self.indices))
        _check_offsets(indptr, self.num_edges)
        _check_nodes(indices, self.num_nodes)
        order = torch.argsort(indices, stable=True)
        degrees = indptr.diff()
        owners = torch.arange(self.num_nodes, dtype=indices.dtype, device="cpu").repeat_interleave(
            degrees
        )
        ids = order if self.edge_ids is None else _load(self.edge_ids)[order]
        found = CSRGraph(
            narrow(_count_degrees(indices, self.num_nodes), self.num_edges),
            owners[order],
            flow="target_to_source" if _is_forward(self.flow) else "source_to_target",
            edge_ids=narrow(ids, self.num_edges) if self.edge_ids is None else ids,
        )
        remember_reverse(self, found)
        return found

    def save(self, directory: str | os.PathLike[str]) -> CSRGraph:
        """Write the lists to new files "indptr.npy", "indices.npy" and perhaps "edge_ids.npy".

        Args:
            directory: Path of a directory, which is made if it is not there.

        Returns:
            The graph in the files, which `CSRGraph(directory / "indptr.npy", ...)` gives as well.

        Raises:
            OSError: The directory cannot be made.
            StoreError: A file exists, or there is no room; nothing is left of the new files.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        lists = {"indptr": self.indptr, "indices": self.indices, "edge_ids": self.edge_ids}
        paths: dict[str, Path] = {}
        try:
            for name, each in lists.items():
                if each is not None:
                    paths[name] = _save_list(each, folder / f"{name}.npy")
        except BaseException:
            for path in paths.values():
                path.unlink()
            raise
        return CSRGraph(**cast("dict[str, Any]", paths), flow=self.flow)

    @property
    def num_bytes(self) -> int:
        """Bytes of the lists, wherever they are."""
        lists = [self.indptr, self.indices, *([] if self.edge_ids is None else [self.edge_ids])]
        return sum(each.numel() * each.dtype.itemsize for each in lists)

    def read_lists(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the lists of some nodes begin in `indices`, and their lengths, as int64.

        Raises:
            ValueError: The offsets of a file fall, or lie outside of `indices`.
        """
        both = read_entries(self.indptr, torch.stack([nodes, nodes + 1]))
        check_bounds(both[0], both[1], nodes, self.num_edges)
        return both[0], both[1] - both[0]

    def read_neighbors(self, places: Tensor) -> Tensor:
        """Return the entries of `indices` at some places, int64 on their device."""
        return read_entries(self.indices, places)

    def damage(self, place: int) -> ValueError:
        """Return the error of an entry of `indices` that is no node."""
        node = int(self.read_neighbors(torch.tensor([place], device="cpu")))
        return ValueError(f"indices[{place}] is {node}, but the graph has {self.num_nodes} nodes")

    def __repr__(self) -> str:
        return (
            f"CSRGraph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, flow={self.flow!r})"
        )


_reverses: weakref.WeakKeyDictionary[CSRGraph, weakref.WeakSet[CSRGraph]] = (
    weakref.WeakKeyDictionary()
)
"""Graphs with the same edges as lists of the other direction, by graph."""


def remember_reverse(graph: CSRGraph, reverse: CSRGraph) -> None:
    """Note that two graphs have the same edges, as lists of both directions."""
    _reverses.setdefault(graph, weakref.WeakSet()).add(reverse)


def is_known_reverse(graph: CSRGraph, reverse: CSRGraph) -> bool:
    """Return whether it was noted that two graphs have the same edges."""
    return reverse in _reverses.get(graph, ())


def _check_flow(flow: Any) -> Flow:
    if flow not in _FLOWS:
        raise ValueError(f"flow={flow!r}: expected one of {', '.join(map(repr, _FLOWS))}")
    return cast("Flow", flow)


def open_uncached(graph: CSRGraph) -> CSRGraph:
    """Return a graph, its tables in files as ones that keep nothing of them in memory."""
    lists = (
        unify(each, cache=0) if in_memory(each) is None else each
        for each in (graph.indptr, graph.indices)
    )
    return CSRGraph(*lists, flow=graph.flow)


def _is_forward(flow: Any) -> bool:
    """Return whether the neighbours of a node are those that edges come from."""
    return _check_flow(flow) == "source_to_target"


def _check_offsets(indptr: Tensor, num_edges: int) -> None:
    first, last = read_entries(indptr, torch.tensor([0, len(indptr) - 1], device="cpu")).tolist()
    if first != 0 or last != num_edges:
        raise ValueError(
            f"indptr: expected to begin with 0 and to end with the number of indices, {num_edges}; "
            f"got {first} and {last}"
        )
    offsets = in_memory(indptr)
    if offsets is not None and len(offsets) > 1:
        falls = (offsets[1:] < offsets[:-1]).nonzero()
        if len(falls):
            node = int(falls[0])
            raise ValueError(
                f"indptr: falls from {int(offsets[node])} to {int(offsets[node + 1])} at node "
                f"{node}; expected offsets that rise"
            )


def _check_nodes(indices: Tensor, num_nodes: int) -> None:
    nodes = in_memory(indices)
    if nodes is None or not len(nodes):
        return
    low, high = (int(each) for each in nodes.aminmax())
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"indices: names node {low if low < 0 else high}, but the graph has {num_nodes} nodes"
        )


def _stack_entries(matrix: Any) -> Tensor:
    """Return rows and columns of the entries of a SciPy matrix in COO, int64 of shape (2, n)."""
    return torch.from_numpy(np.stack([matrix.row, matrix.col]).astype(np.int64))


def _count_degrees(owner: Tensor, num_nodes: int) -> Tensor:
    """Return the offsets of lists whose entries have these owners."""
    offsets = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(owner, minlength=num_nodes), 0, out=offsets[1:])
    return offsets


def _save_list(values: Tensor, path: Path) -> Path:
    found = in_memory(values)
    if found is None:
        cast("UnifiedTensor", values).save_rows(path)
        return path
    array, header = np.ascontiguousarray(found.numpy()), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    with NewFile(path, replace=False) as file:
        file.write(0, [memoryview(header.getvalue())])
        if array.size:
            file.write(header.tell(), [array.data.cast("B")])
        file.finish()
    return path


def _load(values: Tensor) -> Tensor:
    """Return all entries of a list."""
    found = in_memory(values)
    return (
        read_entries(values, torch.arange(len(values), device="cpu")).to(values.dtype)
        if found is None
        else found
    )
