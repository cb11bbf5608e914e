"""`penstock plan`: one plan or a sweep of them, and what is shown of it."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._models import ModelOptions, name_model, show_capture
from penstock.cli._options import (
    MACHINE_OPTION,
    MODEL_ARGUMENT,
    NEEDS_VIZ,
    OPEN_TRACE,
    SAVE_GRAPH_OPTION,
    Interruption,
    directory_option,
    file_option,
    has_unicode,
    name_option,
    number_option,
    size_option,
)
from penstock.cli._results import check_results, show_results
from penstock.errors import InfeasibleError
from penstock.memory.files import replace_file
from penstock.units import format_bytes, format_seconds, parse_bytes, parse_share

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.graph import StepGraph
    from penstock.memory import MachineProfile
    from penstock.planner import Plan
    from penstock.report import Sweep, SweepPoint

_SWEEP_SHARES = (
    *(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    *(1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 10, 1 / 12, 1 / 16),
)

_TABLE_COLUMNS = 80


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """The model, the machine, and the plan that is asked for."""

    model: Annotated[str, MODEL_ARGUMENT]
    device_memory: Annotated[
        str | None,
        size_option(
            "Memory of the device, such as 16GiB, or a share of what the program would need: 1/8, "
            "25%. Default: as much as needed."
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        size_option(
            "Host memory to swap to. Default: with a GPU and without --store all that its host "
            "has, else none."
        ),
    ] = None
    store: Annotated[
        str | None,
        directory_option(
            "Directory on a fast local disk to swap to, and to host memory only as far as "
            "--host-memory says. With --machine it need not be there."
        ),
    ] = None
    machine: Annotated[str | None, MACHINE_OPTION] = None
    reorder: Annotated[bool, typer.Option(help="Operators may change their order.")] = True
    recompute: Annotated[bool, typer.Option(help="Operators may run again.")] = True
    split_products: Annotated[
        bool,
        typer.Option(
            "--split-products",
            help="Products of matrices may run in slices; results then differ by rounding.",
        ),
    ] = False
    method: Annotated[
        Literal["auto", "exact", "genetic"],
        name_option(
            "auto; exact, for up to 200 operators; genetic, SwapAdvisor's algorithm, to compare "
            "with."
        ),
    ] = "auto"
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="For a plan.")] = (
        60.0
    )
    seed: Annotated[int, number_option("Of random choices.")] = 0
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Plan for less and less memory, until nothing fits."),
    ] = False
    save: Annotated[Path | None, file_option("Write the plan (of a sweep: its points).")] = None
    save_graph: Annotated[Path | None, SAVE_GRAPH_OPTION] = None
    trace: Annotated[Path | None, file_option(f"Write the step as a trace; {OPEN_TRACE}")] = None
    picture: Annotated[Path | None, file_option(f"Draw it {NEEDS_VIZ}")] = None


@dataclass(frozen=True)
class CapturedModel:
    """A captured step, and the machine and options that it is planned with."""

    graph: StepGraph
    machine: MachineProfile
    peak_bytes: int
    options: PlanOptions

    def make_plan(
        self, device_bytes: int | None, progress: Callable[[Any], None] | None = None
    ) -> Plan:
        """Plan the step for a budget, with the method of the options."""
        from penstock.planner import plan

        names = ("host_memory", "store", "reorder", "recompute", "split_products", "method")
        return plan(
            self.graph,
            device_memory=device_bytes,
            machine=self.machine,
            progress=progress,
            time_limit=self.options.time_limit,
            seed=self.options.seed,
            **{name: getattr(self.options, name) for name in names},
        )


def plan(options: PlanOptions) -> None:
    """Will it train in this much memory, how fast, and could any schedule do better?

    Captures one training step, without its weights and without a GPU, and plans it: the order of
    operators, what leaves the device when, what is computed again. Ctrl-C takes the best plan so
    far.

    **Examples**

    ```text
    penstock plan gpt2 --device-memory 8GiB --machine v100-16gb-pcie3
    penstock plan llama-7b --device-memory 1/4 --machine h100-80gb
    penstock plan train:make --device-memory 8GiB --save plan.json
    penstock plan gpt2-xl --sweep --machine h200 --picture sweep.png
    ```

    For `train:make`, train.py has a function make() that returns model, optimizer, batch and, if
    the model's output is not the loss, a function loss(output, batch).
    """
    try:
        _show_plans(options)
    except KeyboardInterrupt as error:
        typer.echo("penstock plan: interrupted before there was a plan; nothing is saved", err=True)
        raise Interruption from error


def _show_plans(options: PlanOptions) -> None:
    from rich.console import Console

    from penstock.memory import machine, probe
    from penstock.planner.paging import peak_of_program_order

    parse_device_memory(options.device_memory, 0)  # what is wrong is said before the capture
    ignored = {"--device-memory": options.device_memory, "--trace": options.trace}
    if options.sweep and any(ignored.values()):
        names = " and ".join(name for name, value in ignored.items() if value)
        raise ValueError(f"--sweep plans for many budgets, and has no use of {names}: leave it out")
    check_results(
        save=options.save,
        save_graph=options.save_graph,
        trace=options.trace,
        picture=options.picture,
    )
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    graph = show_capture(options.model, options, options.machine, options.save_graph, err)
    with err.status("Costs of its operators"):
        profile = probe(options.store) if options.machine is None else machine(options.machine)
        captured = CapturedModel(graph, profile, peak_of_program_order(graph), options)
    num_bytes = sum(s.num_bytes for s in graph.storages if s.persistent)
    out.print(
        f"{options.model}: {len(graph.operators):,} operators; as the program runs, "
        f"{format_bytes(captured.peak_bytes)} at its peak, {format_bytes(num_bytes)} of it "
        "parameters, buffers and optimizer state",
        soft_wrap=True,
    )
    if options.sweep:
        _run_sweep(captured, out, err)
    else:
        _run_one(captured, out, err)


def parse_device_memory(text: str | None, peak_bytes: int) -> int | None:
    """Return bytes from a size, or from a share of the program's own peak: "1/8", "25%".

    Example:
        >>> parse_device_memory("1/4", 4096), parse_device_memory("2KiB", 4096)
        (1024, 2048)
    """
    if text is None:
        return None
    share = parse_share(text)
    if share is not None:
        return int(peak_bytes * share)
    try:
        return parse_bytes(text, name="--device-memory")
    except ValueError as error:
        raise ValueError(f'{error}; or a share above 0, such as "1/8" or "25%"') from error


def _run_one(captured: CapturedModel, out: Console, err: Console) -> None:
    from penstock.report import draw_plan, plan_blocks, plan_table, write_plan_trace

    options = captured.options
    device_bytes = parse_device_memory(options.device_memory, captured.peak_bytes)
    with _show_progress(err) as progress:
        plan = captured.make_plan(device_bytes, progress)
    sys.stdout.write(plan_table(captured.graph, plan) + "\n")
    columns = max(20, min(out.width, 100) - 14)
    out.print()
    out.print(plan_blocks(captured.graph, plan, num_columns=columns, unicode=has_unicode(out)))
    graph, title = captured.graph, f"{options.model}, planned"
    show_results(
        "penstock plan",
        {
            "plan": (options.save, plan.save),
            "trace": (
                options.trace,
                lambda path: write_plan_trace(graph, plan, path, title=title),
            ),
            "picture": (options.picture, lambda path: draw_plan(graph, plan, path)),
        },
    )


@contextmanager
def _show_progress(err: Console) -> Iterator[Callable[[Any], None]]:
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


def _run_sweep(captured: CapturedModel, out: Console, err: Console) -> None:
    """Show a sweep as a table, and write it where the options say."""
    from rich.table import Table

    from penstock.report import draw_sweep

    options = captured.options
    sweep = _sweep_memory(captured, err)
    block = "\N{BLACK SQUARE}" if has_unicode(out) else "#"
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
                f"{speed:>4.0%} " + block * round(10 * speed),
                "" if gap is None else f"{gap:.1%}",
            )
    if sweep.minimum_bytes is not None:
        share = f"{sweep.minimum_bytes / captured.peak_bytes:.2f}"
        table.add_row("none", f"below {format_bytes(sweep.minimum_bytes)}", share, "", "", "")
    out.width = max(out.width, _TABLE_COLUMNS)  # a narrow terminal wraps lines and cuts no numbers
    out.print(table)
    text = json.dumps(sweep.to_dict(), indent=1) + "\n"
    show_results(
        "penstock plan",
        {
            "points": (options.save, lambda path: replace_file(path, text)),
            "picture": (options.picture, lambda path: draw_sweep(sweep, path)),
        },
    )


def _sweep_memory(captured: CapturedModel, err: Console) -> Sweep:
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
    with _note_interrupts() as interrupts:
        for share in _SWEEP_SHARES:
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
            if interrupts:
                break
    return Sweep(
        title=name_model(captured.options.model),
        machine=captured.machine.name,
        ideal_seconds=ideal,
        points=tuple(_take_faster(points)),
        minimum_bytes=minimum,
    )


def _take_faster(points: list[SweepPoint]) -> list[SweepPoint]:
    """Return plans, by falling memory, that are no slower than those of less: they fit, too."""
    best, found = math.inf, []
    for point in reversed(points):
        if point.name == "plans":
            best = min(best, point.step_seconds)
            point = replace(point, step_seconds=best)
        found.append(point)
    return found[::-1]


@contextmanager
def _note_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C, which a planner takes for itself to return its best plan."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
