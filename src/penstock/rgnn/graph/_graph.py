"""Graphs with typed edges, and the tensors and numbers that they are made from.

A graph is immutable, so that everything derived from it can be built once and kept; `_indices.py`
does. Making a graph costs far more than a layer, so the last ones are remembered by the tensors
that they were made from, for as long as those live and are not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from penstock.compat.dispatch import is_dispatched, outside_modes
from penstock.rgnn import spaces
from penstock.rgnn.graph._formats import GraphNames, check_integers, read_pyg, read_triples
from penstock.rgnn.graph._indices import GraphTensors, Indices, dtype_for
from penstock.tables import report_table
from penstock.units import parse_count

if TYPE_CHECKING:
    import os

    import numpy as np

_NUM_REMEMBERED = 8
_living: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
"""Graphs by the storage of their edges, which nothing else shares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphStats(spaces.Counts):
    """The counts that decide how a program is laid out on a graph."""

    num_edges_of_relation: tuple[int, ...]
    num_src_pairs_of_relation: tuple[int, ...]
    num_dst_pairs_of_relation: tuple[int, ...]

    @property
    def src_ratio(self) -> float:
        """Unique (source, relation) per edge; 1 for a graph without edges."""
        return self.num_src_pairs / self.num_edges if self.num_edges else 1.0

    @property
    def dst_ratio(self) -> float:
        """Unique (destination, relation) per edge; 1 for a graph without edges."""
        return self.num_dst_pairs / self.num_edges if self.num_edges else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the ratios as plain data, for JSON."""
        ratios = {"src_ratio": self.src_ratio, "dst_ratio": self.dst_ratio}
        return dataclasses.asdict(self) | ratios

    def __str__(self) -> str:
        sizes = sorted(self.num_edges_of_relation) or [0]
        rows: list[tuple[str, object]] = [
            ("num_nodes", self.num_nodes),
            ("num_node_types", self.num_node_types),
            ("num_edges", self.num_edges),
            ("unique (source, relation)", self.num_src_pairs),
            ("unique (destination, relation)", self.num_dst_pairs),
            ("(source, relation) / edges", self.src_ratio),
            ("(destination, relation) / edges", self.dst_ratio),
            ("num_relations", self.num_relations),
            ("relations without edges", self.num_edges_of_relation.count(0)),
            ("edges in the smallest relation", sizes[0]),
            ("edges in the median relation", sizes[len(sizes) // 2]),
            ("edges in the largest relation", sizes[-1]),
        ]
        return report_table(rows, title="penstock.rgnn.Graph")


class Graph(Indices):
    """An immutable directed graph with a relation for each edge and types of nodes.

    Example:
        >>> edge_index = torch.tensor([[0, 0, 2], [1, 2, 1]])
        >>> graph = Graph(edge_index, torch.tensor([0, 1, 0]), num_nodes=4)
        >>> graph.num_edges, graph.num_relations, graph.stats().num_dst_pairs
        (3, 2, 2)

    Args:
        edge_index: Integers, shape (2, num_edges): sources, then destinations. Copied.
        edge_type: Integers, shape (num_edges,): the relation of each edge.
        num_nodes: Number of nodes; by default one more than the largest id that occurs.
        num_relations: Number of relations; by default one more than the largest that occurs.
        node_type: Integers, shape (num_nodes,): the type of each node; by default all 0.
        num_node_types: Number of node types; by default one more than the largest that occurs.
        names: What the numbers stand for; kept as it is.

    Raises:
        TypeError: An argument is no tensor of integers.
        ValueError: A shape does not fit, or an id is out of range; the message names it.
    """

    @outside_modes
    def __init__(
        self,
        edge_index: torch.Tensor,
        edge_type: torch.Tensor,
        *,
        num_nodes: int | None = None,
        num_relations: int | None = None,
        node_type: torch.Tensor | None = None,
        num_node_types: int | None = None,
        names: GraphNames | None = None,
    ) -> None:
        check_integers("edge_index", edge_index)
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(
                f"edge_index must have shape (2, num_edges): sources, then destinations; "
                f"got {tuple(edge_index.shape)}"
            )
        num_edges = edge_index.shape[1]
        check_integers("edge_type", edge_type)
        _check_shape("edge_type", edge_type, num_edges, "one relation for each edge")
        if edge_type.device != edge_index.device:
            raise ValueError(
                f"edge_type is on {edge_type.device} and edge_index on {edge_index.device}; "
                f"move both to one device"
            )
        if node_type is not None:
            check_integers("node_type", node_type)
        if num_nodes is None and node_type is not None:
            num_nodes = node_type.shape[0] if node_type.dim() else None
        num_nodes = _check_ids("edge_index", edge_index, num_nodes, "num_nodes")
        num_relations = _check_ids("edge_type", edge_type, num_relations, "num_relations")
        if node_type is None:
            if num_node_types not in (None, 1):
                raise ValueError(f"num_node_types is {num_node_types!r} without a node_type")
            num_node_types = 1
        else:
            _check_shape("node_type", node_type, num_nodes, "one type for each node")
            num_node_types = _check_ids("node_type", node_type, num_node_types, "num_node_types")
            node_type = _copy_ids(node_type.to(edge_index.device), num_node_types)
        edges = (_copy_ids(edge_index, num_nodes), _copy_ids(edge_type, num_relations))
        set_once = self.__dict__.update  # assignment is refused below
        set_once(
            _tensors=GraphTensors(*edges, node_type, num_nodes, num_relations, num_node_types),
            num_nodes=num_nodes,
            num_edges=num_edges,
            num_relations=num_relations,
            num_node_types=num_node_types,
            names=names or GraphNames(),
        )
        _living[edges[0].untyped_storage()._cdata] = self

    if TYPE_CHECKING:  # set through __dict__, read-only elsewhere
        names: GraphNames

    @classmethod
    def from_pyg(cls, data: Any) -> Graph:
        """Make a graph of PyG's `HeteroData`: node types one after another, relations in its order.

        Example:
            >>> graph = Graph.from_pyg(data)  # doctest: +SKIP
            >>> graph.names.node_types, graph.names.relations  # doctest: +SKIP
            (('paper', 'author'), ('author writes paper',))

        Args:
            data: A `torch_geometric.data.HeteroData` with an `edge_index` for each edge type.

        Returns:
            A graph in which node `i` of type `t` is `i` plus the number of nodes of earlier types.

        Raises:
            TypeError: It is no `HeteroData`, or an `edge_index` does not hold integers.
            ValueError: A number of nodes or an `edge_index` is missing, or an id is out of range.
        """
        return cls(**read_pyg(data))

    @classmethod
    def from_triples(
        cls, triples: torch.Tensor | np.ndarray | str | os.PathLike[str], **kwargs: Any
    ) -> Graph:
        """Make a graph of (head, relation, tail) triples in memory or in a file.

        Example:
            >>> graph = Graph.from_triples(torch.tensor([[0, 1, 2], [2, 0, 0]]))
            >>> graph.num_nodes, graph.num_relations
            (3, 2)

        Args:
            triples: Integers or, in NumPy, strings of shape (num_triples, 3), columns head,
                relation, tail; or a file: N-Triples (`.nt`), OpenKE (`head tail relation` after a
                line with the count), or three columns of names or ids, head, relation, tail, apart
                by tabs or spaces, where lines that begin with `# ` are comments. Files may be
                compressed (`.gz`). Names are numbered in the order in which they occur.
            kwargs: `num_nodes`, `num_relations`, `node_type` as for `Graph`.

        Returns:
            The graph, with an edge from head to tail for each triple, in their order; a triple that
            occurs twice is two edges.

        Raises:
            ValueError: A line is no triple; the message has the file and the line.
        """
        return cls(**(read_triples(triples) | kwargs))

    def with_reverse_edges(self) -> Graph:
        """Return the graph with an edge back for each edge, of relation `r + num_relations`."""
        names = self.names
        if names.relations:
            back = tuple(f"{name} (reverse)" for name in names.relations)
            names = dataclasses.replace(names, relations=names.relations + back)
        edge_index, edge_type, *_ = self._tensors
        back_type = edge_type.long() + self.num_relations
        changed = self._tensors._replace(
            edge_index=torch.cat([edge_index, edge_index.flip(0)], dim=1),
            edge_type=torch.cat([edge_type, back_type]),
            num_relations=2 * self.num_relations,
        )
        return Graph(**changed._asdict(), names=names)

    @property
    def edge_index(self) -> torch.Tensor:
        """A copy of the edges in the order in which they were given, int64, (2, num_edges)."""
        return self._tensors.edge_index.to(torch.int64, copy=True)

    @property
    def edge_type(self) -> torch.Tensor:
        """A copy of the relations in the order in which they were given, int64, (num_edges,)."""
        return self._tensors.edge_type.to(torch.int64, copy=True)

    def to(self, device: torch.device | str) -> Graph:
        """Return the graph with its indices on another device; itself where they are there."""
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self
        moved: dict[str, Any] = self._tensors._asdict()
        moved |= {k: v.to(target) for k, v in moved.items() if isinstance(v, torch.Tensor)}
        return Graph(**moved, names=self.names)

    def stats(self) -> GraphStats:
        """Return edges, unique (node, relation) pairs and relation sizes; `print` shows a table."""
        return GraphStats(
            **dataclasses.asdict(self.counts),
            num_edges_of_relation=_count_rows(self.segment_starts(spaces.EDGE_TYPE)),
            num_src_pairs_of_relation=_count_rows(self.segment_starts(spaces.SRC_PAIR_TYPE)),
            num_dst_pairs_of_relation=_count_rows(self.segment_starts(spaces.DST_PAIR_TYPE)),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Graph is immutable; make a new one to change its {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        names = dataclasses.astuple(self.names)  # plain, so that torch.load takes it as weights
        return (_unpickle, (*self._tensors[:3], self._tensors[3:], names))

    def __repr__(self) -> str:
        has_types = self._tensors.node_type is not None
        types = f", num_node_types={self.num_node_types}" if has_types else ""
        return (
            f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_relations={self.num_relations}{types}, device={str(self.device)!r})"
        )


def _unpickle(*saved: Any) -> Graph:
    *tensors, numbers, (nodes, relations, node_types) = saved
    names = GraphNames(nodes=nodes, relations=relations, node_types=node_types)
    return Graph(**GraphTensors(*tensors, *numbers)._asdict(), names=names)


torch.serialization.add_safe_globals([_unpickle])  # tensors, numbers and texts make a graph


@torch.inference_mode(False)  # a graph outlives the mode that it is made in
def _copy_ids(ids: torch.Tensor, count: int) -> torch.Tensor:
    return ids.detach().to(dtype_for(count), copy=True)


def _count_rows(starts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in itertools.pairwise(starts))


def _check_shape(name: str, value: torch.Tensor, length: int, meaning: str) -> None:
    if value.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), {meaning}; got {tuple(value.shape)}")


def _check_ids(name: str, ids: torch.Tensor, count: int | None, count_name: str) -> int:
    """Return the number of different ids, checked against those that occur."""
    count = None if count is None else parse_count(count, name=count_name)
    if ids.numel() == 0:
        return count or 0
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0:
        raise ValueError(f"{name} holds {low}; ids begin at 0")
    if count is None:
        return high + 1
    if high >= count:
        raise ValueError(
            f"{name} holds {high}, but {count_name} is {count}; ids must be below it. "
            f"Give a larger {count_name}, or leave it out to count the ids"
        )
    return count


def split_graph(graph: Graph) -> GraphTensors:
    """Return the tensors and numbers for which `find_graph` returns this graph."""
    return graph._tensors


def find_graph(made_from: GraphTensors) -> Graph:
    """Return the graph that owns these tensors, else the one made from them, else a new one.

    While Dynamo traces, when tensors have no content yet, it is the tensors themselves.
    """
    if torch.compiler.is_dynamo_compiling():
        return made_from  # pyright: ignore[reportReturnType]
    make = functools.partial(Graph, **made_from._asdict())
    edge_index, edge_type, node_type, *numbers = made_from
    if not (_has_memory(edge_index) and _has_memory(edge_type)):
        return make()  # which raises the error
    graph = _living.get(edge_index.untyped_storage()._cdata)
    if graph is not None:
        return graph
    tensors = [edge_index, edge_type, *([] if node_type is None else [node_type])]
    return remember_graph(tensors, tuple(numbers), make)


def _has_memory(value: object) -> bool:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_dense and not is_dispatched(value)


@dataclasses.dataclass(frozen=True, slots=True)
class _RememberedGraph:
    """A graph, with the storages and versions of the tensors that it was made from."""

    storages: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    copies: tuple[torch.Tensor | None, ...]
    """Of tensors in larger memory, such as an arena, which writes its values uncounted."""
    graph: Graph

    @property
    def is_outlived(self) -> bool:
        """True if a tensor that it was made from is gone."""
        return any(storage() is None for storage in self.storages)

    def is_made_from(self, tensors: Sequence[torch.Tensor], versions: tuple[int, ...]) -> bool:
        """Return whether it is the graph of tensors that lie where its own did."""
        if self.versions != versions or self.is_outlived:
            return False
        pairs = zip(tensors, self.copies, strict=True)
        return all(copy is None or torch.equal(tensor, copy) for tensor, copy in pairs)


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


_remembered: OrderedDict[tuple[Any, ...], _RememberedGraph] = OrderedDict()
_lock = threading.Lock()


def remember_graph(
    tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...], make: Callable[[], Graph]
) -> Graph:
    """Return the graph of `make`, or the one that it made before of the same tensors and numbers.

    Args:
        tensors: The tensors that the graph is made from. A change in place is noticed by torch's
            version counter, or in memory that is larger than the tensor by comparison; so not if
            it goes through `.data` or NumPy.
        numbers: Everything else that decides about it.
        make: Makes the graph.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return make()  # such tensors do not count their changes
    views = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in tensors]
    key = (numbers, *views, *(tensor.untyped_storage()._cdata for tensor in tensors))
    versions = tuple(tensor._version for tensor in tensors)
    with _lock:
        known = _remembered.get(key)
        if known is not None and known.is_made_from(tensors, versions):
            _remembered.move_to_end(key)
            return known.graph
    copies = tuple(tensor.clone() if _is_part(tensor) else None for tensor in tensors)
    graph = make()
    # An address names a storage only as long as the weak reference is held.
    storages = tuple(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
    with _lock:
        for old in [old for old, known in _remembered.items() if known.is_outlived]:
            del _remembered[old]
        _remembered[key] = _RememberedGraph(storages, versions, copies, graph)
        _remembered.move_to_end(key)
        if len(_remembered) > _NUM_REMEMBERED:
            _remembered.popitem(last=False)
    return graph
