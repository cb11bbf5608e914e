"""`penstock plan`: one plan or a sweep of them, and what is shown of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli._captured import CapturedModel, PlanOptions, add_machine
from penstock.cli._models import load_graph
from penstock.cli._options import INTERRUPTED
from penstock.cli._sweep import run_sweep
from penstock.units import format_bytes, format_seconds, parse_bytes, parse_share

if TYPE_CHECKING:
    from rich.console import Console


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
        run_plan(options)
    except KeyboardInterrupt as error:
        typer.echo("penstock plan: interrupted before there was a plan; nothing is saved", err=True)
        raise typer.Exit(INTERRUPTED) from error


def run_plan(options: PlanOptions) -> None:
    """Capture and plan the step of a model, and show the plan or the sweep.

    Raises:
        PenstockError, ValueError, OSError, ImportError: As their messages say.
    """
    from rich.console import Console

    from penstock.graph import with_workspace
    from penstock.memory import machine

    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status(f"Capturing a training step of {options.model}"):
        graph = load_graph(options.model, options)
        if options.machine is not None:
            graph = with_workspace(graph, machine(options.machine).device)
    if options.save_graph is not None:
        graph.save(options.save_graph)
    with err.status("Costs of its operators"):
        captured = add_machine(graph, options)
    num_bytes = sum(s.num_bytes for s in graph.storages if s.persistent)
    out.print(
        f"{options.model}: {len(graph.operators):,} operators; as the program runs, "
        f"{format_bytes(captured.peak_bytes)} at its peak, {format_bytes(num_bytes)} of it "
        "parameters, buffers and optimizer state",
        soft_wrap=True,
    )
    if options.sweep:
        run_sweep(captured, out, err)
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
    return parse_bytes(text, name="--device-memory")


def _run_one(captured: CapturedModel, out: Console, err: Console) -> None:
    from penstock.report import draw_plan, plan_blocks, plan_table, write_plan_trace

    options = captured.options
    device_bytes = parse_device_memory(options.device_memory, captured.peak_bytes)
    with _show_progress(err) as progress:
        plan = captured.make_plan(device_bytes, progress)
    unicode = (out.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(plan_table(captured.graph, plan) + "\n")
    columns = max(20, min(out.width, 100) - 14)
    out.print()
    out.print(plan_blocks(captured.graph, plan, num_columns=columns, unicode=unicode))
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        plan.save(options.save)
    if options.trace is not None:
        write_plan_trace(captured.graph, plan, options.trace, title=f"{options.model}, planned")
    if options.picture is not None:
        draw_plan(captured.graph, plan, options.picture)
    results = {"plan": options.save, "trace": options.trace, "picture": options.picture}
    for name, path in results.items():
        if path is not None:
            out.print(f"{name}: {path}", soft_wrap=True)


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
