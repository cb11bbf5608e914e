"""`penstock partition`: a step over several devices, and what is shown of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli._models import ModelOptions, name_model, show_capture
from penstock.cli._options import (
    MACHINE_OPTION,
    MODEL_ARGUMENT,
    NEEDS_VIZ,
    SAVE_GRAPH_OPTION,
    Interruption,
    file_option,
    has_unicode,
    number_option,
    size_option,
)
from penstock.cli._plan import parse_device_memory
from penstock.cli._results import check_results, show_results
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class PartitionOptions(ModelOptions):
    """The model, the devices, and what each of them holds."""

    model: Annotated[str, MODEL_ARGUMENT]
    devices: Annotated[int, number_option("Ranks.", min=2)] = 8
    device_memory: Annotated[
        str | None,
        size_option(
            "Memory of each, such as 16GiB, or a share of what one device would need: 1/8, 25%. "
            "Default: as much as needed."
        ),
    ] = None
    machine: Annotated[str | None, MACHINE_OPTION] = None
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Of the search.")
    ] = 60.0
    seed: Annotated[int, number_option("Of random choices.")] = 0
    save: Annotated[Path | None, file_option("Write the partition.")] = None
    save_graph: Annotated[Path | None, SAVE_GRAPH_OPTION] = None
    picture: Annotated[Path | None, file_option(f"Draw memory against exchange, {NEEDS_VIZ}")] = (
        None
    )


def partition(options: PartitionOptions) -> None:
    """Split a step over several devices: the bytes that each holds and exchanges, layer by layer.

    Captures one training step of the whole batch, without its weights and without any device, and
    splits it: batch, parameters, products, or some of each. Shows the split, layer by layer, and
    what more or less memory would change.

    **Examples**

    ```text
    penstock partition gpt2-xl --batch 4 --devices 8 --device-memory 16GiB --machine v100-16gb-pcie3
    penstock partition llama-7b --devices 8 --device-memory 40GiB --machine a100-80gb
    penstock partition train:make --devices 4 --save partition.json
    ```
    """
    try:
        _show_partition(options)
    except KeyboardInterrupt as error:
        typer.echo("penstock partition: interrupted; nothing is saved", err=True)
        raise Interruption from error


def _show_partition(options: PartitionOptions) -> None:
    from rich.console import Console

    from penstock.memory import machine, probe
    from penstock.partitioner import check
    from penstock.partitioner import partition as find_partition
    from penstock.planner.paging import peak_of_program_order
    from penstock.report import draw_frontier, frontier_table, partition_map

    parse_device_memory(options.device_memory, 0)  # what is wrong is said before the capture
    check_results(save=options.save, save_graph=options.save_graph, picture=options.picture)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    graph = show_capture(options.model, options, options.machine, options.save_graph, err)
    peak = peak_of_program_order(graph)
    budget = parse_device_memory(options.device_memory, peak)
    out.print(
        f"{options.model}: {len(graph.operators):,} operators; one device would need "
        f"{format_bytes(peak)}",
        soft_wrap=True,
    )
    with err.status(f"Splitting it over {options.devices} devices"):
        found = find_partition(
            graph,
            devices=options.devices,
            device_memory=budget,
            machine=probe() if options.machine is None else machine(options.machine),
            time_limit=options.time_limit,
            seed=options.seed,
        )
        check(graph, found)
    sys.stdout.write(f"{found}\n\n{frontier_table(found, unicode=has_unicode(out))}\n\n")
    sys.stdout.write(f"{partition_map(graph, found)}\n")
    title = f"{name_model(options.model)}, split over {options.devices} devices"
    show_results(
        "penstock partition",
        {
            "partition": (options.save, found.save),
            "picture": (options.picture, lambda path: draw_frontier(found, path, title=title)),
        },
    )
