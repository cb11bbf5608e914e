"""A plan as a picture: device memory over time by kind of tensor, and the streams below."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.graph import Kind, StepGraph
from penstock.planner import Plan, Simulation, simulate
from penstock.report._figures import (
    LEGEND_OUTSIDE,
    draw_lanes,
    new_figure,
    style_axes,
    write_figure,
)
from penstock.report._lanes import LaneKind, sort_into_lanes
from penstock.report._plan_timeline import plan_timeline
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 1 << 30


class KindStyle(NamedTuple):
    """Drawing of a kind of tensor: its name, its colour, and its character in blocks.

    Shades tell kinds apart on terminals without colours, letters on those without Unicode.
    """

    name: str
    colour: str
    shade: str
    letter: str


# Okabe and Ito's palette; lasting values are dark, temporary ones light.
KIND_STYLES: Mapping[Kind, KindStyle] = {
    Kind.PARAMETER: KindStyle("parameters", "#0072B2", "\N{FULL BLOCK}", "P"),
    Kind.OPTIMIZER_STATE: KindStyle("optimizer state", "#56B4E9", "\N{DARK SHADE}", "O"),
    Kind.BUFFER: KindStyle("buffers", "#7F7F7F", "#", "b"),
    Kind.INPUT: KindStyle("batch", "#F0E442", "=", "i"),
    Kind.ACTIVATION: KindStyle("activations", "#E69F00", "\N{LIGHT SHADE}", "a"),
    Kind.GRADIENT: KindStyle("gradients", "#CC79A7", "\N{MEDIUM SHADE}", "g"),
    Kind.SCALAR: KindStyle("scalars", "#000000", ".", "s"),
}
_LANE_STYLES = {
    "forward": ("forward", "#009E73"),
    "backward": ("backward", "#5E3C99"),
    "optimizer": ("optimizer", "#444444"),
    "recomputation": ("recomputation", "#B2ABD2"),
    LaneKind.WRITE: ("transfers out", "#999933"),
    LaneKind.READ: ("transfers in", "#44AA99"),
    LaneKind.STALL: ("waiting for a transfer", "#D55E00"),
}


def draw_plan(
    graph: StepGraph,
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw a plan: device memory by kind of tensor, and the work of device and links over time.

    Example:
        >>> draw_plan(graph, plan, "plan.png")  # doctest: +SKIP
        PosixPath('plan.png')

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        path: The picture to write, replaced if it exists; the suffix decides the format.
        title: The headline; by default the step's time, its share of the ideal and the memory.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is missing; the extra `viz` brings it.
        ValueError: The suffix of `path` names no format that matplotlib writes.
        OSError: The file cannot be written.
    """
    figure = new_figure("a plan", (12.0, 6.4), pads_inches=(0.12, 0.1))
    simulation = simulate(graph, plan)
    memory_axes, lane_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1.5])
    _draw_memory(memory_axes, plan, simulation)
    lanes = sort_into_lanes(plan_timeline(graph, plan, simulation, name_operators=False))
    names = [lane.title.removeprefix("writes ").removeprefix("reads ") for lane in lanes]
    draw_lanes(lane_axes, lanes, names, _LANE_STYLES, unit_ns=1e9, fontsize=10)
    lane_axes.set_xlabel("time within a step, seconds", fontsize=11)
    lane_axes.set_xlim(0, max(simulation.step_seconds, 1e-9))
    figure.suptitle(title or _make_headline(plan), fontsize=13)
    return write_figure(figure, path)


def _make_headline(plan: Plan) -> str:
    """Return one line about a plan: time, share of the ideal, memory, machine."""
    share = plan.ideal_seconds / plan.step_seconds if plan.step_seconds else 1.0
    return (
        f"{format_seconds(plan.step_seconds)} a step, {share:.0%} of the speed with unlimited "
        f"memory, in {format_bytes(plan.peak_device_bytes)} on {plan.machine.name}"
    )


def bin_memory(simulation: Simulation, times: Sequence[float]) -> dict[Kind, list[int]]:
    """Return the most bytes of each kind that occurs between each time and the next.

    The kinds of a moment are those of its fullest position, so that they add up.
    """
    kinds = _list_kinds(simulation)
    if not kinds:
        return {}
    totals = [sum(column) for column in zip(*simulation.memory_bytes.values(), strict=True)]
    starts = [start for start, _ in simulation.positions]
    fullest = []
    for begin, end in itertools.pairwise(times):
        first = max(bisect.bisect_right(starts, begin) - 1, 0)  # it has begun before
        last = max(bisect.bisect_right(starts, end), first + 1)
        fullest.append(max(range(first, last), key=totals.__getitem__))
    return {kind: [simulation.memory_bytes[kind][p] for p in fullest] for kind in kinds}


def _list_kinds(simulation: Simulation) -> list[Kind]:
    """Return the kinds that take memory, in the order in which they are stacked."""
    return [kind for kind in KIND_STYLES if any(simulation.memory_bytes.get(kind, ()))]


def _draw_memory(axes: Axes, plan: Plan, simulation: Simulation) -> None:
    starts = [start for start, _ in simulation.positions]
    edges = [0.0, *starts[1:], simulation.step_seconds]
    base = [0.0] * len(edges)
    for kind in _list_kinds(simulation):
        taken = simulation.memory_bytes[kind]
        values = [num_bytes / _GIB for num_bytes in (*taken, taken[-1])]
        top = [low + more for low, more in zip(base, values, strict=True)]
        axes.fill_between(
            edges,
            base,
            top,
            step="post",
            color=KIND_STYLES[kind].colour,
            linewidth=0,
            label=f"{KIND_STYLES[kind].name}, at most {format_bytes(max(taken))}",
        )
        base = top
    limit = plan.budget.device_bytes
    arena = plan.arena_bytes / _GIB
    axes.axhline(
        arena, color="black", linewidth=1.2, label=f"arena, {format_bytes(plan.arena_bytes)}"
    )
    if limit is not None:
        axes.axhline(
            limit / _GIB,
            color="#D55E00",
            linewidth=1.2,
            linestyle="--",
            label=f"budget, {format_bytes(limit)}",
        )
    axes.set_ylim(0, 1.06 * max(arena, (limit or 0) / _GIB, 1e-9))
    axes.set_ylabel("device memory, GiB", fontsize=11)
    style_axes(axes)
    axes.legend(**LEGEND_OUTSIDE, fontsize=10)
