"""A plan for the terminal: a table of its costs, and device memory over time in blocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.graph import Kind, StepGraph
from penstock.planner import Plan, simulate
from penstock.report._plan_picture import KIND_STYLES, bin_memory
from penstock.tables import report_table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.text import Text

_BOX = (
    "\N{BOX DRAWINGS LIGHT VERTICAL}",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}",
    "\N{BOX DRAWINGS LIGHT UP AND RIGHT}",
)
_ASCII_BOX = ("|", "-", "+")
_NUM_TARGETS = 3  # names of recomputed operators in the table


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
    if plan.split_bytes is not None:
        num_parts = len(plan.operator_seconds) - len(graph.operators)
        rows.append(("split", f"{num_parts} operators more, each with some rows or one parameter"))
    if plan.workspace_bytes:
        rows.append(("of it workspace", format_bytes(plan.workspace_bytes)))
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
    rows.append(("method", f"{plan.method}, seed {plan.seed}, for {plan.machine.name}"))
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
    cells = {
        kind: (KIND_STYLES[kind].shade if unicode else KIND_STYLES[kind].letter) for kind in memory
    }
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
                text.append(cells[column[row]], style=KIND_STYLES[column[row]].colour)
            else:
                text.append(" ")
        text.append("\n")
    text.append(f"{'0 B':>{width}} {corner}{line * num_columns}\n")
    text.append(f"{'':>{width}}  0{format_seconds(step):>{num_columns - 1}}\n{'':>{width}}  ")
    shown = {kind for column in columns for kind in column}
    for kind in (kind for kind in memory if kind in shown):
        text.append(cells[kind] * 2, style=KIND_STYLES[kind].colour)
        text.append(f" {KIND_STYLES[kind].name}  ")
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
