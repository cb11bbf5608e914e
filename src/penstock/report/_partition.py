"""Partitions as text and as pictures: a map, layer by layer, and memory against exchange."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.compat.figures import new_figure
from penstock.graph import Kind, Phase, StepGraph, TensorView
from penstock.partitioner import Partition
from penstock.report._picture import choose_unit, write_figure
from penstock.units import format_bytes

_NUMBER = re.compile(r"\d+")
_UPDATE = "(update)"
_OTHER = "(between layers)"
_KINDS = {
    "all_gather": "gather",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "halo": "halo",
}


@dataclass
class _Layer:
    """One module: its weights at rest, its result, and what a rank receives for it."""

    name: str
    weights: list[str] = field(default_factory=list)
    result: str = ""
    num_bytes: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)


def describe_placement(partition: Partition, view: TensorView, placement: tuple[int, ...]) -> str:
    """Return a placement in words, by dimensions of a view: `"dim 0 /8"`, `"whole"`, `"sums"`."""
    pieces: dict[str, int] = {}
    for stride, size in zip(placement, partition.mesh, strict=True):
        if stride < 0:
            pieces["sums"] = pieces.get("sums", 1) * size
        elif stride > 0:
            name = _name_dimension(view, stride)
            pieces[name] = pieces.get(name, 1) * size
    return ", ".join(f"{name} /{number}" for name, number in pieces.items()) or "whole"


def _name_dimension(view: TensorView, stride: int) -> str:
    for dim, (size, own) in enumerate(zip(view.shape, view.stride, strict=True)):
        if own and own <= stride < own * size:
            return f"dim {dim}"
    return "an index"


def partition_map(graph: StepGraph, partition: Partition) -> str:
    """Return the placements of a step as text, a line for each layer; layers alike share one.

    Columns: the layer; where its weights are split at rest, by dimension and number of pieces
    (`whole` on every rank otherwise); how its result is split; the bytes that a rank receives for
    it in a step, forward and backward, over all layers of the line, and by which collectives.
    """
    rows = [("layer", "weights at rest", "result", "received in a step")]
    for name, layers in _fold(_list_layers(graph, partition)):
        first = layers[0]
        received = sum(each.num_bytes for each in layers)
        kinds = ", ".join(
            f"{number * len(layers)} {_KINDS[kind]}" for kind, number in sorted(first.kinds.items())
        )
        exchange = f"{format_bytes(round(received))}: {kinds}" if kinds else ""
        weights = first.weights or [""]
        rows.append((name, weights[0], first.result, exchange))
        rows += [("", each, "", "") for each in weights[1:]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in rows
    )


def _list_layers(graph: StepGraph, partition: Partition) -> list[_Layer]:
    layers: dict[str, _Layer] = {}

    def layer(name: str) -> _Layer:
        return layers.setdefault(name, _Layer(name))

    names = {
        graph.storage(view.value).name: view
        for name, view in graph.tensors.items()
        if graph.storage(view.value).kind is Kind.PARAMETER and name.startswith("model.")
    }
    for operator in graph.operators:
        is_update = operator.phase is Phase.OPTIMIZER
        own = layer(_UPDATE if is_update else operator.module or _OTHER)
        made = next((view for view in operator.outputs if view is not None), None)
        if operator.phase is Phase.FORWARD and made is not None and made.shape:
            placement = partition.placement(graph, made.value)
            own.result = describe_placement(partition, made, placement)
        for value in operator.reads if operator.phase is Phase.FORWARD else ():
            storage = graph.storage(value)
            view = names.pop(storage.name, None)
            if view is not None:
                text = describe_placement(partition, view, partition.placement(graph, value))
                short = storage.name.rpartition(".")[2]
                own.weights.append(f"{short}: {text}")
    for each in partition.collectives:
        operator = graph.operators[each.operator]
        is_update = operator.phase is Phase.OPTIMIZER
        own = layer(_UPDATE if is_update else operator.module or _OTHER)
        own.num_bytes += each.num_bytes
        own.kinds[each.kind] = own.kinds.get(each.kind, 0) + 1
    order = [name for name in layers if name not in (_OTHER, _UPDATE)]
    order += [name for name in (_OTHER, _UPDATE) if name in layers]
    return [layers[name] for name in order if layers[name].weights or layers[name].kinds]


def _fold(layers: list[_Layer]) -> Iterator[tuple[str, list[_Layer]]]:
    """Yield layers that differ in the numbers of their names alone, with a name for all."""
    groups: dict[tuple[object, ...], list[_Layer]] = {}
    for each in layers:
        pattern = _NUMBER.sub("#", each.name)
        key = pattern, tuple(each.weights), each.result, round(each.num_bytes), *sorted(each.kinds)
        groups.setdefault(key, []).append(each)
    for members in groups.values():
        numbers = [[int(n) for n in _NUMBER.findall(each.name)] for each in members]
        ranges = [_range_of(sorted(set(column))) for column in zip(*numbers, strict=True)]
        found = iter(ranges)
        yield _NUMBER.sub(lambda _: next(found), members[0].name), members  # noqa: B023


def _range_of(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    dense = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if dense else ",".join(map(str, numbers))


def frontier_table(partition: Partition, *, unicode: bool = True, num_rows: int = 12) -> str:
    """Return memory of a rank against bytes that it receives, as text with bars.

    Args:
        partition: The partition; its own point has a mark.
        unicode: Whether blocks may be drawn; else with `#`.
        num_rows: Most points that are shown.
    """
    points = [*partition.frontier]
    step = max(1, -(-len(points) // num_rows))
    chosen = partition.peak_device_bytes, partition.exchanged_bytes
    wanted = {*range(0, len(points), step), len(points) - 1}
    shown = [each for i, each in enumerate(points) if i in wanted or each[:2] == chosen]
    most = max((point.exchanged_bytes for point in shown), default=1) or 1
    block = "\N{BLACK SQUARE}" if unicode else "#"
    lines = [f"{'memory of a rank':>18}  {'received':>10}  mesh"]
    for point in shown:
        bar = block * round(30 * point.exchanged_bytes / most)
        mark = " <- this" if point[:2] == chosen else ""
        mesh = "x".join(map(str, point.mesh))
        memory, received = map(format_bytes, point[:2])
        lines.append(f"{memory:>18}  {received:>10}  {mesh:<8} {bar}{mark}")
    return "\n".join(lines)


def draw_frontier(partition: Partition, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw memory of a rank against bytes that it receives, with the budget and the partition.

    Args:
        partition: The partition.
        path: A PNG, SVG or PDF file.
        title: Above the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    points = partition.frontier
    most_bytes = max(point.peak_device_bytes for point in points)
    most_exchanged = max(point.exchanged_bytes for point in points)
    (unit, name), (other, other_name) = choose_unit(most_bytes), choose_unit(most_exchanged)
    figure = new_figure("a frontier", (9.0, 5.0))
    axes = figure.add_subplot()
    memory = [point.peak_device_bytes / unit for point in points]
    received = [point.exchanged_bytes / other for point in points]
    axes.plot(memory, received, drawstyle="steps-post", color="#7F7F7F", linewidth=1)
    axes.plot(memory, received, "o", color="#0072B2", label="partitions", clip_on=False)
    here = partition.peak_device_bytes / unit, partition.exchanged_bytes / other
    axes.plot(*here, "o", markersize=11, color="#D55E00", label="this one", clip_on=False)
    if partition.device_bytes is not None:
        axes.axvline(partition.device_bytes / unit, color="#D55E00", linestyle=":", label="budget")
    axes.set(xlabel=f"memory of the fullest rank ({name})", ylim=(0, 1.06 * max(received) or None))
    axes.set(ylabel=f"received by a rank in a step ({other_name})")
    axes.legend(frameon=False)
    write_figure(figure, path, title or f"{partition.devices} devices")
