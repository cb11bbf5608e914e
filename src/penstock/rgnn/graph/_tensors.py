"""A graph as the tensors and numbers that it is made from, and back again.

Making a graph costs far more than a layer, so the last ones are remembered by the tensors that they
were made from, for as long as those live and are not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.rgnn.graph._graph import Graph, find_owner
from penstock.rgnn.graph._indices import GraphTensors

_NUM_REMEMBERED = 8


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
    if not (isinstance(edge_index, torch.Tensor) and isinstance(edge_type, torch.Tensor)):
        return make()  # which raises the error
    graph = find_owner(edge_index)
    if graph is not None:
        return graph
    tensors = [edge_index, edge_type, *([] if node_type is None else [node_type])]
    return remember_graph(tensors, tuple(numbers), make)


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
    views = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in tensors]
    key = (numbers, *views, *(tensor.untyped_storage()._cdata for tensor in tensors))
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
