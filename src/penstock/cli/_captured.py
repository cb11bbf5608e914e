"""Input of `penstock plan`: its options, and the captured step with its machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._models import ModelOptions
from penstock.cli._options import (
    NEEDS_VIZ,
    OPEN_TRACE,
    directory_option,
    file_option,
    name_option,
    number_option,
    size_option,
)

if TYPE_CHECKING:
    from penstock.graph import StepGraph
    from penstock.memory import MachineProfile
    from penstock.planner import Plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """The model, the machine, and the plan that is asked for."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name such as gpt2 or llama-7b; a JSON file with a Transformers configuration "
            "or a saved step graph; or module:function.",
            show_default=False,
        ),
    ]
    device_memory: Annotated[
        str | None,
        size_option(
            "Memory of the device, such as 16GiB, or a share of what the program would need: 1/8, "
            "25%. Default: as much as needed."
        ),
    ] = None
    host_memory: Annotated[
        str | None, size_option("Host memory to swap to. Default: the machine's.")
    ] = None
    store: Annotated[str | None, directory_option("Directory on a fast local disk to swap to.")] = (
        None
    )
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="v100-16gb-pcie3, a100-80gb, h100-80gb or h200. Default: this machine.",
            show_default=False,
        ),
    ] = None
    reorder: Annotated[bool, typer.Option(help="Operators may change their order.")] = True
    recompute: Annotated[bool, typer.Option(help="Operators may run again.")] = True
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
    save_graph: Annotated[
        Path | None,
        file_option("Write the captured step, as .json or .json.gz; it can be MODEL next time."),
    ] = None
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

        options = self.options
        return plan(
            self.graph,
            device_memory=device_bytes,
            host_memory=options.host_memory,
            store=options.store,
            machine=self.machine,
            reorder=options.reorder,
            recompute=options.recompute,
            method=options.method,
            time_limit=options.time_limit,
            seed=options.seed,
            progress=progress,
        )


def add_machine(graph: StepGraph, options: PlanOptions) -> CapturedModel:
    """Find the machine of the options, and the step's peak as the program runs."""
    from penstock.memory import machine, probe
    from penstock.planner.paging import peak_of_program_order

    profile = probe(options.store) if options.machine is None else machine(options.machine)
    return CapturedModel(graph, profile, peak_of_program_order(graph), options)
