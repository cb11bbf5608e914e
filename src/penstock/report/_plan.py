"""A plan as a timeline, as a trace and a picture, and as a table and blocks of text.

Its simulation in the form of a recorded step is drawn and traced by the same code as a step that
ran. The step is one of many equal ones: a transfer that goes over its end is shown at its
beginning, too. Picture and blocks show device memory over time by kind of tensor.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.compat.figures import LEGEND_OUTSIDE, new_figure
from penstock.graph import Kind, StepGraph
from penstock.memory import Span, Tier, Timeline
from penstock.planner import Copy, Plan, Simulation, simulate
from penstock.report._picture import (
    MOST_MILLISECONDS,
    choose_unit,
    draw_lanes,
    style_axes,
    write_figure,
)
from penstock.report._trace import (
    LaneKind,
    chrome_trace,
    make_counter,
    sort_into_lanes,
    write_json,
)
from penstock.tables import report_table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.text import Text


class _KindStyle(NamedTuple):
    """Drawing of a kind of tensor: its name, its colour, and its character in blocks.

    Shades tell kinds apart on terminals without colours, letters on those without Unicode.
    """

    name: str
    colour: str
    shade: str
    letter: str


# Okabe and Ito's palette; lasting values are dark, temporary ones light.
_KIND_STYLES: Mapping[Kind, _KindStyle] = {
    Kind.PARAMETER: _KindStyle("parameters", "#0072B2", "\N{FULL BLOCK}", "P"),
    Kind.OPTIMIZER_STATE: _KindStyle("optimizer state", "#56B4E9", "\N{DARK SHADE}", "O"),
    Kind.BUFFER: _KindStyle("buffers", "#7F7F7F", "#", "b"),
    Kind.INPUT: _KindStyle("batch", "#F0E442", "=", "i"),
    Kind.ACTIVATION: _KindStyle("activations", "#E69F00", "\N{LIGHT SHADE}", "a"),
    Kind.GRADIENT: _KindStyle("gradients", "#CC79A7", "\N{MEDIUM SHADE}", "g"),
    Kind.SCALAR: _KindStyle("scalars", "#000000", ".", "s"),
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

_BOX = (
    "\N{BOX DRAWINGS LIGHT VERTICAL}",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}",
    "\N{BOX DRAWINGS LIGHT UP AND RIGHT}",
)
_ASCII_BOX = ("|", "-", "+")
_NUM_TARGETS = 3  # names of recomputed operators in the table


def plan_timeline(
    graph: StepGraph,
    plan: Plan,
    simulation: Simulation | None = None,
    *,
    name_operators: bool = True,
) -> Timeline:
    """Turn a plan into the timeline of one of its steps, from 0 nanoseconds on.

    Example:
        >>> write_chrome_trace(plan_timeline(graph, plan), "plan.json")  # doctest: +SKIP

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        simulation: The simulation of the plan, if it is at hand.
        name_operators: True names computations after operators; False after their phases, and
            joins consecutive ones of one phase.

    Returns:
        Computations, transfers and stalls, and the bytes that the plan has on each tier.
    """
    simulation = simulate(graph, plan) if simulation is None else simulation
    planned = plan.planned_graph(graph)
    spans = _list_computations(planned, plan, simulation, name_operators=name_operators)
    spans += _list_stalls(simulation)
    spans += _list_transfers(plan, simulation)
    return Timeline(
        start_ns=0,
        end_ns=_to_ns(simulation.step_seconds),
        samples=_sample_tiers(plan, simulation),
        spans=sorted(spans, key=lambda span: span.start_ns),
    )


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _list_computations(
    graph: StepGraph, plan: Plan, simulation: Simulation, *, name_operators: bool
) -> list[Span]:
    again = set(plan.recomputed)
    spans: list[Span] = []
    for position, (start, stop) in enumerate(simulation.positions):
        operator = graph.operators[plan.order[position]]
        if name_operators:
            name = f"{operator.name} (again)" if position in again else operator.name
        else:
            name = "recomputation" if position in again else operator.phase.value
        begin = _to_ns(start)
        follows = spans and spans[-1].name == name and begin - spans[-1].end_ns <= 1
        if follows and not name_operators:
            begin = spans.pop().start_ns
        spans.append(Span("compute", name, begin, _to_ns(stop)))
    return spans


def _list_stalls(simulation: Simulation) -> Iterator[Span]:
    for stall in simulation.stalls:
        if stall.position < len(simulation.positions):
            until = simulation.positions[stall.position][0]
        else:
            until = simulation.step_seconds
        yield Span("stall", "waits for a transfer", _to_ns(until - stall.seconds), _to_ns(until))


def _list_transfers(plan: Plan, simulation: Simulation) -> Iterator[Span]:
    step = simulation.step_seconds
    for transfer, (start, end) in zip(plan.transfers, simulation.transfers, strict=True):
        shift = start // step * step if step else 0.0
        parts = [(start - shift, end - shift)]
        while parts[-1][1] > step > 0:  # it goes on in the next step
            begin, stop = parts.pop()
            parts += [(begin, step), (0.0, stop - step)]
        for begin, stop in parts:
            yield Span(transfer.link.value, "", _to_ns(begin), _to_ns(stop), transfer.num_bytes)


def _sample_tiers(plan: Plan, simulation: Simulation) -> dict[Tier, list[tuple[int, int]]]:
    """Return the bytes of each tier after every change, from the beginning of the step on."""
    totals = {Tier.DEVICE: [sum(c) for c in zip(*simulation.memory_bytes.values(), strict=True)]}
    for tier in (Tier.HOST, Tier.FILE):
        copies = [copy for copy in plan.copies if copy.tier == tier]
        if copies:
            totals[tier] = _sum_copies(copies, len(plan.order))
    starts = [0, *(_to_ns(start) for start, _ in simulation.positions[1:])]
    samples = {}
    for tier, column in totals.items():
        changes = zip(starts, column, [None, *column], strict=False)
        samples[tier] = [(start, total) for start, total, before in changes if total != before]
    return samples


def _sum_copies(copies: list[Copy], num_positions: int) -> list[int]:
    """Return the bytes of copies at each position of the step."""
    change = [0] * (2 * num_positions + 1)
    for copy in copies:
        change[copy.start] += copy.num_bytes
        change[min(copy.end, copy.start + num_positions)] -= copy.num_bytes
    held = list(itertools.accumulate(change[:-1]))
    # What is held beyond the end of the step is held at its beginning.
    halves = zip(held[:num_positions], held[num_positions:], strict=True)
    return [now + later for now, later in halves]


def plan_trace(graph: StepGraph, plan: Plan, *, title: str = "Penstock plan") -> dict[str, Any]:
    """Turn a plan into the JSON object that trace viewers open.

    Example:
        >>> plan_trace(graph, plan)["displayTimeUnit"]  # doctest: +SKIP
        'ms'

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        title: The name above the rows.

    Returns:
        A JSON-serialisable object with the key `"traceEvents"`; the counter "device memory" has a
        series for each kind of tensor.
    """
    simulation = simulate(graph, plan)
    trace = chrome_trace(plan_timeline(graph, plan, simulation), title=title)
    kinds = [kind for kind, taken in simulation.memory_bytes.items() if any(taken)]
    before: dict[str, int] | None = None
    for position, (start, _) in enumerate(simulation.positions):
        taken = {kind.value: simulation.memory_bytes[kind][position] for kind in kinds}
        if taken != before:
            event = make_counter("device memory by kind", start * 1e6, taken)
            trace["traceEvents"].append(event)
            before = taken
    trace["otherData"] |= {"method": plan.method, "graph": plan.graph_digest}
    return trace


def write_plan_trace(
    graph: StepGraph,
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    title: str = "Penstock plan",
) -> Path:
    """Write a plan as a Chrome trace; open the file with https://ui.perfetto.dev.

    Example:
        >>> write_plan_trace(graph, plan, "plan.trace.json")  # doctest: +SKIP
        PosixPath('plan.trace.json')

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        path: The file to write, replaced if it exists; missing directories are made.
        title: The name above the rows.

    Returns:
        The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    return write_json(plan_trace(graph, plan, title=title), path)


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
    lanes = sort_into_lanes(plan_timeline(graph, plan, simulation, name_operators=False))
    names = [lane.title.removeprefix("writes ").removeprefix("reads ") for lane in lanes]
    is_short = simulation.step_seconds * 1e3 <= MOST_MILLISECONDS
    unit_seconds, unit = (1e-3, "ms") if is_short else (1.0, "s")
    _draw_memory(memory_axes, plan, simulation, unit_seconds)
    draw_lanes(lane_axes, lanes, names, _LANE_STYLES, unit_ns=unit_seconds * 1e9, fontsize=10)
    lane_axes.set_xlabel(f"time within a step, {unit}", fontsize=11)
    lane_axes.set_xlim(0, max(simulation.step_seconds, 1e-9) / unit_seconds)
    return write_figure(figure, path, title or _make_headline(plan))


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
    for begin, end in itertools.pairwise([*times[:-1], math.inf]):
        before = max(bisect.bisect_right(starts, begin) - 1, 0)
        first = min(before, bisect.bisect_left(starts, begin))
        last = max(bisect.bisect_left(starts, end), first + 1)
        fullest.append(max(range(first, last), key=totals.__getitem__))
    return {kind: [simulation.memory_bytes[kind][p] for p in fullest] for kind in kinds}


def _list_kinds(simulation: Simulation) -> list[Kind]:
    """Return the kinds that take memory, in the order in which they are stacked."""
    return [kind for kind in _KIND_STYLES if any(simulation.memory_bytes.get(kind, ()))]


def _draw_memory(axes: Axes, plan: Plan, simulation: Simulation, unit_seconds: float) -> None:
    starts = [start for start, _ in simulation.positions]
    edges = [at / unit_seconds for at in (0.0, *starts[1:], simulation.step_seconds)]
    limit = plan.budget.device_bytes
    unit_bytes, unit = choose_unit(max(plan.arena_bytes, limit or 0))
    base = [0.0] * len(edges)
    for kind in _list_kinds(simulation):
        taken = simulation.memory_bytes[kind]
        values = [num_bytes / unit_bytes for num_bytes in (*taken, taken[-1])]
        top = [low + more for low, more in zip(base, values, strict=True)]
        axes.fill_between(
            edges,
            base,
            top,
            step="post",
            color=_KIND_STYLES[kind].colour,
            linewidth=0,
            label=f"{_KIND_STYLES[kind].name}, at most {format_bytes(max(taken))}",
        )
        base = top
    arena = plan.arena_bytes / unit_bytes
    axes.axhline(
        arena, color="black", linewidth=1.2, label=f"arena, {format_bytes(plan.arena_bytes)}"
    )
    if limit is not None:
        axes.axhline(
            limit / unit_bytes,
            color="#D55E00",
            linewidth=1.2,
            linestyle="--",
            label=f"budget, {format_bytes(limit)}",
        )
    axes.set_ylim(0, 1.06 * max(arena, (limit or 0) / unit_bytes, 1e-9))
    axes.set_ylabel(f"device memory, {unit}", fontsize=11)
    style_axes(axes)
    axes.legend(**LEGEND_OUTSIDE, fontsize=10)


def plan_table(graph: StepGraph, plan: Plan) -> str:
    """Lay out a plan as a table: times, bound, memory, bytes on the links, recomputation.

    Example:
        >>> print(plan_table(graph, plan))  # doctest: +SKIP

    Args:
        graph: The graph that the plan is for.
        plan: The plan.

    Returns:
        Lines of text, in colour if standard output is a terminal.
    """
    share = plan.ideal_seconds / plan.step_seconds if plan.step_seconds else 1.0
    budget = plan.budget.device_bytes
    peak = format_bytes(plan.peak_device_bytes)
    rows: list[tuple[str, object]] = [
        ("step", f"{format_seconds(plan.step_seconds)}  ({share:.1%} of the ideal's speed)"),
        ("ideal", f"{format_seconds(plan.ideal_seconds)}  (unlimited memory, nothing moves)"),
        ("no plan beats", f"{format_seconds(plan.lower_bound_seconds)}  ({plan.bound.binding})"),
        ("gap", f"{max(plan.gap, 0.0):.1%}  (a better plan is faster by at most this)"),
        ("device", f"{peak}  of {format_bytes(budget)}" if budget is not None else peak),
    ]
    if plan.workspace_bytes:
        rows.append(("of it workspace", format_bytes(plan.workspace_bytes)))
    if plan.split_bytes is not None:
        num_parts = len(plan.operator_seconds) - len(graph.operators)
        rows.append(("split", f"{num_parts} operators more, each with some rows or one parameter"))
    for name, num_bytes in (("host", plan.peak_host_bytes), ("file", plan.peak_file_bytes)):
        if num_bytes:
            rows.append((name, format_bytes(num_bytes)))
    for link, num_bytes in plan.bytes_moved.items():
        busy = num_bytes / plan.machine.links[link].bytes_per_second / plan.step_seconds
        moved = f"{format_bytes(num_bytes)} a step  (busy {busy:.0%} of the time)"
        rows.append((link.value, moved))
    if not plan.bytes_moved:
        rows.append(("moved", "nothing"))
    rows += _list_recomputed(plan.planned_graph(graph), plan)
    method = plan.method
    if plan.notes.get("searched") is False:
        method = f"{plan.notes.get('finalist', method)} (no search: see `penstock env`)"
    rows.append(("method", f"{method}, seed {plan.seed}, for {plan.machine.name}"))
    return report_table(rows, title="penstock plan")


def _list_recomputed(graph: StepGraph, plan: Plan) -> list[tuple[str, object]]:
    positions = plan.recomputed
    if not positions:
        return [("recomputed", "nothing")]
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for position in positions:
        index = plan.order[position]
        target = graph.operators[index].target.removeprefix("aten.").split(".")[0]
        seconds[target] = seconds.get(target, 0.0) + plan.operator_seconds[index]
        counts[target] += 1
    total = sum(seconds.values())
    named = [
        f"{counts[target]} {target} ({format_seconds(time)})"
        for target, time in sorted(seconds.items(), key=lambda item: -item[1])[:_NUM_TARGETS]
    ]
    more = len(seconds) - len(named)
    rest = f", {more} more kinds" if more > 0 else ""
    return [
        ("recomputed", f"{len(positions)} operators, {format_seconds(total)}"),
        ("of them", ", ".join(named) + rest),
    ]


def plan_blocks(
    graph: StepGraph,
    plan: Plan,
    *,
    num_columns: int = 78,
    num_rows: int = 12,
    unicode: bool = True,
) -> Text:
    """Draw device memory over time as blocks of characters, stacked by kind of tensor.

    Example:
        >>> rich.print(plan_blocks(graph, plan))  # doctest: +SKIP

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        num_columns: Width of the drawing, without the axis.
        num_rows: Height of the drawing.
        unicode: True if the terminal shows more than ASCII.

    Returns:
        Text for `rich`, in colour.
    """
    from rich.text import Text

    simulation = simulate(graph, plan)
    step = simulation.step_seconds
    times = [step * column / num_columns for column in range(num_columns + 1)]
    memory = bin_memory(simulation, times)
    cells = {kind: s.shade if unicode else s.letter for kind, s in _KIND_STYLES.items()}
    top = max(plan.arena_bytes, 1)
    columns = [_fill_column(memory, place, top, num_rows) for place in range(num_columns)]
    text = Text()
    axis, line, corner = _BOX if unicode else _ASCII_BOX
    width = max(len(format_bytes(top)), 9)
    for row in range(num_rows - 1, -1, -1):
        label = format_bytes(top) if row == num_rows - 1 else ""
        text.append(f"{label:>{width}} {axis}")
        for column in columns:
            if row < len(column):
                text.append(cells[column[row]], style=_KIND_STYLES[column[row]].colour)
            else:
                text.append(" ")
        text.append("\n")
    text.append(f"{'0 B':>{width}} {corner}{line * num_columns}\n")
    text.append(f"{'':>{width}}  0{format_seconds(step):>{num_columns - 1}}\n{'':>{width}}")
    shown = {kind for column in columns for kind in column}
    num_left = num_columns
    for kind in (kind for kind in memory if kind in shown):
        entry = f" {_KIND_STYLES[kind].name}"
        if num_left < len(entry) + 4 <= num_columns:  # an entry is not broken
            text.append(f"\n{'':>{width}}")
            num_left = num_columns
        text.append("  ").append(cells[kind] * 2, style=_KIND_STYLES[kind].colour).append(entry)
        num_left -= len(entry) + 4
    return text


def _fill_column(memory: dict[Kind, list[int]], place: int, top: int, num_rows: int) -> list[Kind]:
    """Return the kinds of one column's cells from below; each cell has the kind at its middle."""
    cells: list[Kind] = []
    level, cell = 0, top / num_rows
    for kind, taken in memory.items():
        level += taken[place]
        while (len(cells) + 0.5) * cell < level and len(cells) < num_rows:
            cells.append(kind)
    return cells
