"""`penstock plan --sweep`: plans for less and less memory, and the table of their speeds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli._captured import CapturedModel
from penstock.errors import InfeasibleError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.report import Sweep

SWEEP_SHARES = (
    *(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    *(1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 10, 1 / 12, 1 / 16),
)


class _Interruption:
    """A note of Ctrl-C, which a planner takes for itself to return its best plan."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> _Interruption:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def run_sweep(captured: CapturedModel, out: Console, err: Console) -> None:
    """Show a sweep as a table, and write it where the options say."""
    from rich.table import Table

    from penstock.report import draw_sweep

    options = captured.options
    sweep = sweep_memory(captured, err)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "memory", "share", "step", "speed", "gap"):
        table.add_column(heading, no_wrap=True)
    for name in sweep.names:
        for point in reversed(sweep.curve(name)):
            speed = sweep.ideal_seconds / point.step_seconds
            bound = point.lower_bound_seconds
            gap = max(0.0, point.step_seconds / bound - 1) if bound else None
            table.add_row(
                "plan" if name == "plans" else name,
                format_bytes(point.device_bytes),
                f"{point.device_bytes / captured.peak_bytes:.2f}",
                format_seconds(point.step_seconds),
                f"{speed:>4.0%} " + "\N{BLACK SQUARE}" * round(10 * speed),
                "" if gap is None else f"{gap:.1%}",
            )
    if sweep.minimum_bytes is not None:
        share = f"{sweep.minimum_bytes / captured.peak_bytes:.2f}"
        table.add_row("none", f"below {format_bytes(sweep.minimum_bytes)}", share, "", "", "")
    out.print(table)
    if options.picture is not None:
        draw_sweep(sweep, options.picture)
        out.print(f"picture: {options.picture}", soft_wrap=True)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(sweep.to_dict(), indent=1) + "\n")
        out.print(f"points: {options.save}", soft_wrap=True)


def sweep_memory(captured: CapturedModel, err: Console) -> Sweep:
    """Plan for less and less memory until nothing fits; Ctrl-C ends the sweep."""
    from penstock.planner import Budget, PlanRequest
    from penstock.planner.paging import plan_checkpointing
    from penstock.report import Sweep, SweepPoint

    request = PlanRequest(graph=captured.graph, budget=Budget(), machine=captured.machine)
    other, ideal = plan_checkpointing(request), request.compute_seconds
    peak, seconds = other.peak_device_bytes, other.step_seconds
    points = [
        SweepPoint(name="stock", device_bytes=captured.peak_bytes, step_seconds=ideal),
        SweepPoint(name="checkpointing", device_bytes=peak, step_seconds=seconds),
    ]
    minimum = None
    with _Interruption() as interruption:
        for share in SWEEP_SHARES:
            budget = int(captured.peak_bytes * share)
            try:
                with err.status(f"Planning for {format_bytes(budget)}; Ctrl-C ends the sweep"):
                    plan = captured.make_plan(budget)
            except InfeasibleError as error:
                minimum = max(error.minimum_device_bytes or budget, budget)
                break
            except KeyboardInterrupt:
                break
            seconds, bound = plan.step_seconds, plan.lower_bound_seconds
            points.append(
                SweepPoint(
                    name="plans",
                    device_bytes=budget,
                    step_seconds=seconds,
                    lower_bound_seconds=bound,
                )
            )
            if interruption.seen:
                break
    return Sweep(
        title=Path(captured.options.model).name.removesuffix(".gz").removesuffix(".json"),
        machine=captured.machine.name,
        ideal_seconds=ideal,
        points=tuple(points),
        minimum_bytes=minimum,
    )
