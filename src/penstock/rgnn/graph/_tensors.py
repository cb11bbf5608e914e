"""A graph as the tensors and numbers that it is made from, and back again.

Making a graph costs far more than a layer, so the last ones are remembered by the tensors that they
were made from, for as long as those live and are not changed.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.rgnn.graph._graph import Graph, find_owner
from penstock.rgnn.spaces import Space

_NUM_REMEMBERED = 8


class GraphTensors(NamedTuple):
    """Tensors and numbers that a graph is made from."""

    edge_index: torch.Tensor
    edge_type: torch.Tensor
    node_type: torch.Tensor | None
    num_nodes: int
    num_relations: int
    num_node_types: int

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self.edge_index.device

    def rows(self, space: Space) -> int:
        """Return the number of rows in a space that arguments and results can have."""
        return {
            Space.EDGE: self.edge_index.shape[1],
            Space.NODE: self.num_nodes,
            Space.RELATION: self.num_relations,
            Space.NODE_TYPE: self.num_node_types,
        }[space]


def split_graph(graph: Graph) -> GraphTensors:
    """Return the tensors and numbers for which `find_graph` returns this graph."""
    return GraphTensors(
        graph._edge_index,
        graph._edge_type,
        graph._node_type,
        graph.num_nodes,
        graph.num_relations,
        graph.num_node_types,
    )


def find_graph(made_from: GraphTensors) -> Graph:
    """Return the graph that owns these tensors, else the one made from them, else a new one.

    While Dynamo traces, when tensors have no content yet, it is the tensors themselves.

    Raises:
        ValueError: An id is out of range, or a shape does not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        return made_from  # pyright: ignore[reportReturnType]
    edge_index, edge_type, node_type, num_nodes, num_relations, num_node_types = made_from
    is_of_tensors = isinstance(edge_index, torch.Tensor) and isinstance(edge_type, torch.Tensor)
    graph = find_owner(edge_index) if is_of_tensors else None
    if graph is not None:
        return graph

    def make() -> Graph:
        return Graph(
            edge_index,
            edge_type,
            num_nodes=num_nodes,
            num_relations=num_relations,
            node_type=node_type,
            num_node_types=num_node_types,
        )

    if not is_of_tensors:
        return make()  # which raises the error
    tensors = [edge_index, edge_type, *([] if node_type is None else [node_type])]
    return remember_graph(tensors, (num_nodes, num_relations, num_node_types), make)


@dataclasses.dataclass(frozen=True, slots=True)
class _RememberedGraph:
    """A graph, with the storages and versions of the tensors that it was made from."""

    storages: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    graph: Graph

    @property
    def is_outlived(self) -> bool:
        """True if a tensor that it was made from is gone."""
        return any(storage() is None for storage in self.storages)


_remembered: OrderedDict[tuple[Any, ...], _RememberedGraph] = OrderedDict()
_lock = threading.Lock()


def remember_graph(
    tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...], make: Callable[[], Graph]
) -> Graph:
    """Return the graph of `make`, or the one that it made before of the same tensors and numbers.

    Args:
        tensors: The tensors that the graph is made from. A change in place is noticed by torch's
            version counter, so not if it goes through `.data` or NumPy.
        numbers: Everything else that decides about it.
        make: Makes the graph.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return make()  # such tensors do not count their changes
    key = (numbers, *(_identify(tensor) for tensor in tensors))
    versions = tuple(tensor._version for tensor in tensors)
    with _lock:
        known = _remembered.get(key)
        if known is not None and known.versions == versions and not known.is_outlived:
            _remembered.move_to_end(key)
            return known.graph
    graph = make()
    # An address names a storage only as long as the weak reference is held.
    storages = tuple(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
    with _lock:
        for old in [old for old, known in _remembered.items() if known.is_outlived]:
            del _remembered[old]
        _remembered[key] = _RememberedGraph(storages, versions, graph)
        _remembered.move_to_end(key)
        if len(_remembered) > _NUM_REMEMBERED:
            _remembered.popitem(last=False)
    return graph


def _identify(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
