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
    return _divide(graph, parts) if parts else graph


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


def _divide(graph: StepGraph, parts: dict[str, list[_Range]]) -> StepGraph:
    """Divide inputs; all values and storages stay, and those of parts come behind them."""
    storages, storage_of_value = [*graph.storages], [*graph.storage_of_value]
    tensors = dict(graph.tensors)
    pieces: dict[int, dict[_Range, int]] = {}  # of each divided value the values of its parts
    for name, ranges in parts.items():
        whole, dtype = graph.tensors[name].value, graph.tensors[name].dtype
        storage = graph.storage(whole)
        storages[storage_of_value[whole]] = dataclasses.replace(storage, num_bytes=0)  # no use
        for part in ranges:
            begin, end = (each // item_bytes(dtype) for each in part)
            value = len(storage_of_value)
            storage_of_value.append(len(storages))
            storages.append(
                Storage(
                    name=f"{storage.name}[{begin}:{end}]",
                    num_bytes=part.end - part.begin,
                    kind=Kind.INPUT,
                    initial=value,
                    final=value,
                )
            )
            tensors[f"{_PREFIX}.{begin}:{end}.{name}"] = TensorView(
                value, dtype, (end - begin,), (1,)
            )
            pieces.setdefault(whole, {})[part] = value
    return dataclasses.replace(
        graph,
        storages=tuple(storages),
        storage_of_value=tuple(storage_of_value),
        operators=tuple(_read_pieces(operator, pieces) for operator in graph.operators),
        tensors=tensors,
    )


def _read_pieces(operator: Operator, pieces: dict[int, dict[_Range, int]]) -> Operator:
    """Let an operator view the parts of divided inputs."""
    divided = [view for view in _views_of(operator) if view.value in pieces]
    if not divided:
        return operator

    def replace(view: TensorView) -> TensorView:
        if view.value not in pieces:
            return view
        parts = pieces[view.value]
        if 0 in view.shape:
            return view._replace(value=next(iter(parts.values())), offset=0)
        begin, end = _range_of(view)
        part = next(part for part in parts if part.begin <= begin and end <= part.end)
        offset = view.offset - part.begin // item_bytes(view.dtype)
        return view._replace(value=parts[part], offset=offset)

    reads = dict.fromkeys(value for value in operator.reads if value not in pieces)
    reads |= dict.fromkeys(replace(view).value for view in divided)
    return dataclasses.replace(
        operator,
        args=map_views(replace, operator.args),
        kwargs=map_views(replace, operator.kwargs),
        recompute_args=map_views(replace, operator.recompute_args),
        reads=tuple(reads),
        may_overwrite=tuple(pair for pair in operator.may_overwrite if pair[0] not in pieces),
    )
