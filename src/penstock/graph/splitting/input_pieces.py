"""Division of inputs that operators view in parts.

A sequence whose time steps are read one after the other, or a batch that runs in micro-batches, is
one storage, and every operator that views a hundredth of it needs it whole. Where parts do not
overlap each becomes a storage with a residency of its own. The tensor itself stays in the caller's
memory; parts are named by their elements, as `"part.512:1024.batch.0"`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.graph.splitting._forms import item_bytes
from penstock.graph.step_graph import (
    Kind,
    Operator,
    StepGraph,
    Storage,
    TensorView,
    map_views,
    views_in,
)

_PREFIX = "part"
_LEAST_SHARE = 1 / 16  # of the bytes that an operator may need: smaller inputs stay whole
_ALIGNMENT_BYTES = 64  # parts begin where a vector would: kernels may add in another order else


class _Range(NamedTuple):
    """A range of a storage, in bytes."""

    begin: int
    end: int


def divide_inputs(graph: StepGraph, max_bytes: int) -> StepGraph:
    """Return the graph in which large inputs are the parts that operators view."""
    num_names = Counter(view.value for view in graph.tensors.values())
    parts = {}
    for name, view in graph.tensors.items():
        storage = graph.storage(view.value)
        is_large = storage.num_bytes > max_bytes * _LEAST_SHARE
        if storage.kind is Kind.INPUT and is_large and num_names[view.value] == 1:
            parts[name] = _find_parts(graph, view.value, view.dtype)
    parts = {name: found for name, found in parts.items() if len(found) > 1}
    return _InputDivider(graph, parts).run() if parts else graph


def part_of_input(name: str) -> tuple[str, int, int] | None:
    """Return the tensor, the first element and the end of a part; None for other names."""
    prefix, _, rest = name.partition(".")
    if prefix != _PREFIX:
        return None
    elements, _, whole = rest.partition(".")
    begin, _, end = elements.partition(":")
    return whole, int(begin), int(end)


def _find_parts(graph: StepGraph, value: int, dtype: str) -> list[_Range]:
    """Return the ranges of a value that operators view; none if it has to stay whole."""
    if graph.storage(value).final is not None:
        return []
    users = [graph.operators[index] for index in graph.consumers[value]]
    views = [[view for view in _views_of(user) if view.value == value] for user in users]
    if not item_bytes(dtype) or any(value == old for user in users for old, _ in user.mutates):
        return []
    if not all(looks and all(view.dtype == dtype for view in looks) for looks in views):
        return []
    return _merge_ranges(view for looks in views for view in looks)


def _views_of(operator: Operator) -> Iterator[TensorView]:
    return views_in((operator.args, operator.kwargs, operator.recompute_args))


def _merge_ranges(views: Iterable[TensorView]) -> list[_Range]:
    """Return the ranges of views, with those that overlap as one."""
    parts: list[_Range] = []
    for begin, end in sorted(_range_of(view) for view in views if 0 not in view.shape):
        if parts and (begin < parts[-1].end or begin % _ALIGNMENT_BYTES):
            parts[-1] = parts[-1]._replace(end=max(end, parts[-1].end))
        else:
            parts.append(_Range(begin, end))
    if parts and parts[0].begin % _ALIGNMENT_BYTES:
        parts[0] = parts[0]._replace(begin=parts[0].begin // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
    return parts


def _range_of(view: TensorView) -> _Range:
    """Return the bytes from a view's first element to its last; it has some."""
    num_bytes = item_bytes(view.dtype)
    return _Range(view.offset * num_bytes, view.end * num_bytes)


class _InputDivider:
    """Keeps all values and storages; those of parts come behind them."""

    def __init__(self, graph: StepGraph, parts: dict[str, list[_Range]]) -> None:
        self._graph = graph
        self._parts = {graph.tensors[name].value: found for name, found in parts.items()}
        self._names = {graph.tensors[name].value: name for name in parts}
        self._storages = list(graph.storages)
        self._storage_of_value = list(graph.storage_of_value)
        self._tensors = dict(graph.tensors)
        self._values: dict[tuple[int, _Range], int] = {}

    def run(self) -> StepGraph:
        """Write the graph."""
        for value, name in self._names.items():
            self._add_parts(value, name, self._parts[value])
        operators = tuple(
            self._operator(operator)
            if any(view.value in self._parts for view in _views_of(operator))
            else operator
            for operator in self._graph.operators
        )
        return dataclasses.replace(
            self._graph,
            storages=tuple(self._storages),
            storage_of_value=tuple(self._storage_of_value),
            operators=operators,
            tensors=self._tensors,
        )

    def _add_parts(self, value: int, name: str, parts: list[_Range]) -> None:
        index = self._storage_of_value[value]
        whole, dtype = self._storages[index], self._tensors[name].dtype
        self._storages[index] = dataclasses.replace(whole, num_bytes=0)  # it has no use here
        for part in parts:
            begin, end = (each // item_bytes(dtype) for each in part)
            self._storages.append(
                Storage(
                    name=f"{whole.name}[{begin}:{end}]",
                    num_bytes=part.end - part.begin,
                    kind=Kind.INPUT,
                    initial=len(self._storage_of_value),
                    final=len(self._storage_of_value),
                )
            )
            self._values[value, part] = len(self._storage_of_value)
            self._tensors[f"{_PREFIX}.{begin}:{end}.{name}"] = TensorView(
                len(self._storage_of_value), dtype, (end - begin,), (1,)
            )
            self._storage_of_value.append(len(self._storages) - 1)

    def _operator(self, operator: Operator) -> Operator:
        reads = dict.fromkeys(value for value in operator.reads if value not in self._parts)
        reads |= dict.fromkeys(
            self._replace_view(view).value
            for view in _views_of(operator)
            if view.value in self._parts
        )
        return dataclasses.replace(
            operator,
            args=map_views(self._replace_view, operator.args),
            kwargs=map_views(self._replace_view, operator.kwargs),
            recompute_args=map_views(self._replace_view, operator.recompute_args),
            reads=tuple(reads),
            may_overwrite=tuple(
                (read, made) for read, made in operator.may_overwrite if read not in self._parts
            ),
        )

    def _replace_view(self, view: TensorView) -> TensorView:
        """Return the view of a part; of a value that is not divided the view itself."""
        if view.value not in self._parts:
            return view
        parts = self._parts[view.value]
        if 0 in view.shape:
            return view._replace(value=self._values[view.value, parts[0]], offset=0)
        begin, end = _range_of(view)
        part = next(part for part in parts if part.begin <= begin and end <= part.end)
        offset = view.offset - part.begin // item_bytes(view.dtype)
        return view._replace(value=self._values[view.value, part], offset=offset)
