"""What `penstock plan` does: budgets, one plan or a sweep of them, and what is shown of it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._plan_models import ModelOptions, load_graph
from penstock.errors import InfeasibleError
from penstock.units import format_bytes, format_seconds, parse_bytes, parse_share

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.graph import StepGraph
    from penstock.memory import MachineProfile
    from penstock.planner import Plan
    from penstock.report import Sweep

SWEEP_SHARES = (
    1.0,
    0.9,
    0.8,
    0.7,
    0.6,
    0.5,
    0.4,
    1 / 3,
    1 / 4,
    1 / 6,
    1 / 8,
    1 / 10,
    1 / 12,
    1 / 16,
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line asks for; fields as its options."""

    source: str
    model: ModelOptions
    device_memory: str | None
    host_memory: str | None
    store: str | None
    machine: str | None
    reorder: bool
    recompute: bool
    method: str
    time_limit: float
    seed: int
    save: Path | None
    save_graph: Path | None
    trace: Path | None
    picture: Path | None
    sweep: bool


@dataclass(frozen=True)
class _Task:
    """A captured step with what it is planned for."""

    graph: StepGraph
    machine: MachineProfile
    peak_bytes: int
    options: PlanOptions


def run(options: PlanOptions) -> None:
    """Do what the command line asks for; errors are raised.

    Raises:
        PenstockError, ValueError, OSError, ImportError: As their messages say.
    """
    from rich.console import Console

    from penstock.graph import with_workspace
    from penstock.memory import machine

    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status(f"Capturing a training step of {options.source}"):
        graph = load_graph(options.source, options.model)
        if options.machine is not None:
            graph = with_workspace(graph, machine(options.machine).device)
    if options.save_graph is not None:
        graph.save(options.save_graph)
    with err.status("Costs of its operators"):
        task = _task(graph, options)
    num_bytes = sum(s.num_bytes for s in graph.storages if s.persistent)
    out.print(
        f"{options.source}: {len(graph.operators):,} operators; as the program runs, "
        f"{format_bytes(task.peak_bytes)} at its peak, {format_bytes(num_bytes)} of it parameters, "
        "buffers and optimizer state",
        soft_wrap=True,
    )
    if options.sweep:
        _run_sweep(task, out, err)
    else:
        _run_plan(task, out, err)


def parse_device_memory(text: str | None, peak_bytes: int) -> int | None:
    """Bytes from a size, or from a share of the program's own peak: "1/8", "25%".

    Example:
        >>> parse_device_memory("1/4", 4096), parse_device_memory("2KiB", 4096)
        (1024, 2048)
    """
    if text is None:
        return None
    share = parse_share(text)
    if share is not None:
        return int(peak_bytes * share)
    return parse_bytes(text, name="--device-memory")


def _task(graph: StepGraph, options: PlanOptions) -> _Task:
    from penstock.memory import machine, probe
    from penstock.planner.paging import peak_of_program_order

    profile = probe(options.store) if options.machine is None else machine(options.machine)
    return _Task(graph, profile, peak_of_program_order(graph), options)


def _run_plan(task: _Task, out: Console, err: Console) -> None:
    from penstock.report import draw_plan, plan_blocks, plan_table, write_plan_trace

    options = task.options
    device_bytes = parse_device_memory(options.device_memory, task.peak_bytes)
    with _shown(err) as progress:
        plan = make_plan(task, device_bytes, progress)
    unicode = (out.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(plan_table(task.graph, plan) + "\n")
    columns = max(20, min(out.width, 100) - 14)
    out.print()
    out.print(plan_blocks(task.graph, plan, num_columns=columns, unicode=unicode))
    for what, path in (("plan", options.save), ("trace", options.trace)):
        if path is not None:
            if what == "plan":
                path.parent.mkdir(parents=True, exist_ok=True)
                plan.save(path)
            else:
                write_plan_trace(task.graph, plan, path, title=f"{options.source}, planned")
            out.print(f"{what}: {path}", soft_wrap=True)
    if options.picture is not None:
        draw_plan(task.graph, plan, options.picture)
        out.print(f"picture: {options.picture}", soft_wrap=True)


def make_plan(
    task: _Task, device_bytes: int | None, progress: Callable[[Any], None] | None
) -> Plan:
    """One plan, with the method that was asked for."""
    from penstock.planner import plan

    options = task.options
    return plan(
        task.graph,
        device_memory=device_bytes,
        host_memory=options.host_memory,
        store=options.store,
        machine=task.machine,
        reorder=options.reorder,
        recompute=options.recompute,
        method=options.method,
        time_limit=options.time_limit,
        seed=options.seed,
        progress=progress,
    )


@contextmanager
def _shown(err: Console) -> Iterator[Callable[[Any], None]]:
    """Show the best time, the bound and the gap while a plan is made."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, transient=True) as bar:
        shown = bar.add_task("planning; Ctrl-C takes the best plan so far")

        def progress(found: Any) -> None:
            bound = found.lower_bound_seconds
            gap = found.step_seconds / bound - 1 if bound else 0.0
            bar.update(
                shown,
                description=f"best {format_seconds(found.step_seconds)}, "
                f"bound {format_seconds(bound)}, gap {gap:.1%}; Ctrl-C takes it",
            )

        yield progress


class _Interruption:
    """Whether Ctrl-C was pressed: a planner takes it for itself and gives its best plan."""

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


def _run_sweep(task: _Task, out: Console, err: Console) -> None:
    from rich.table import Table

    from penstock.report import draw_sweep

    options = task.options
    sweep = sweep_memory(task, err)
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
                f"{point.device_bytes / task.peak_bytes:.2f}",
                format_seconds(point.step_seconds),
                f"{speed:>4.0%} " + "\N{BLACK SQUARE}" * round(10 * speed),
                "" if gap is None else f"{gap:.1%}",
            )
    if sweep.minimum_bytes is not None:
        share = f"{sweep.minimum_bytes / task.peak_bytes:.2f}"
        table.add_row("none", f"below {format_bytes(sweep.minimum_bytes)}", share, "", "", "")
    out.print(table)
    if options.picture is not None:
        draw_sweep(sweep, options.picture)
        out.print(f"picture: {options.picture}", soft_wrap=True)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(sweep.to_dict(), indent=1) + "\n")
        out.print(f"points: {options.save}", soft_wrap=True)


def sweep_memory(task: _Task, err: Console) -> Sweep:
    """Plan for less and less memory until nothing fits; Ctrl-C ends the sweep."""
    from penstock.planner import Budget, PlanRequest
    from penstock.planner.paging import plan_checkpointing
    from penstock.report import Sweep, SweepPoint

    request = PlanRequest(graph=task.graph, budget=Budget(), machine=task.machine)
    checkpointed, ideal = plan_checkpointing(request), request.compute_seconds
    points = [SweepPoint(name="stock", device_bytes=task.peak_bytes, step_seconds=ideal)]
    points.append(
        SweepPoint(
            name="checkpointing",
            device_bytes=checkpointed.peak_device_bytes,
            step_seconds=checkpointed.step_seconds,
        )
    )
    minimum = None
    with _Interruption() as interruption:
        for share in SWEEP_SHARES:
            budget = int(task.peak_bytes * share)
            try:
                with err.status(f"Planning for {format_bytes(budget)}; Ctrl-C ends the sweep"):
                    plan = make_plan(task, budget, None)
            except InfeasibleError as error:
                minimum = error.minimum_device_bytes or budget
                minimum = max(minimum, budget)
                break
            except KeyboardInterrupt:
                break
            points.append(
                SweepPoint(
                    name="plans",
                    device_bytes=budget,
                    step_seconds=plan.step_seconds,
                    lower_bound_seconds=plan.lower_bound_seconds,
                )
            )
            if interruption.seen:
                break
    return Sweep(
        title=Path(task.options.source).name.removesuffix(".gz").removesuffix(".json"),
        machine=task.machine.name,
        ideal_seconds=ideal,
        points=tuple(points),
        minimum_bytes=minimum,
    )
