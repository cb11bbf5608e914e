"""`penstock plan`: its options. What it does is in `_plan_run`, which loads when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name such as gpt2 or llama-7b; a JSON file with a Transformers configuration "
            "or a saved step graph; or module:function.",
            show_default=False,
        ),
    ],
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the device, such as 16GiB, or a share of what the program would need: "
            "1/8, 25%. Default: as much as needed.",
            show_default=False,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory to swap to. Default: the machine's.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Directory on a fast local disk to swap to.", show_default=False
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="v100-16gb-pcie3, a100-80gb, h100-80gb or h200. Default: this machine.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of a batch.")] = 8,
    sequence: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens of a sample. Default: the model's longest, at most 1024.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "adam", "sgd"],
        typer.Option(metavar="NAME", help="adamw, adam, or sgd (with momentum)."),
    ] = "adamw",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(metavar="NAME", help="Of parameters: float32, bfloat16, float16."),
    ] = "float32",
    reorder: Annotated[bool, typer.Option(help="Operators may change their order.")] = True,
    recompute: Annotated[bool, typer.Option(help="Operators may run again.")] = True,
    method: Annotated[
        Literal["auto", "genetic", "lru", "lru-prefetch", "belady", "layers-lp"],
        typer.Option(
            metavar="NAME",
            help="auto; to compare with: genetic, lru, lru-prefetch, belady, layers-lp.",
        ),
    ] = "auto",
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="For a plan.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of random choices.")] = 0,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Plan for less and less memory, until nothing fits."),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the plan (of a sweep: its points).", show_default=False
        ),
    ] = None,
    save_graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the captured step, as .json or .json.gz; it can be MODEL next time.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the step as a trace; open it with https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw it as a PNG (or SVG, PDF); needs the extra `viz`.",
            show_default=False,
        ),
    ] = None,
) -> None:
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
    from penstock import _plan_run
    from penstock._plan_models import ModelOptions
    from penstock.errors import PenstockError

    options = _plan_run.PlanOptions(
        source=model,
        model=ModelOptions(batch=batch, sequence=sequence, optimizer=optimizer, dtype=dtype),
        device_memory=device_memory,
        host_memory=host_memory,
        store=store,
        machine=machine,
        reorder=reorder,
        recompute=recompute,
        method=method,
        time_limit=time_limit,
        seed=seed,
        save=save,
        save_graph=save_graph,
        trace=trace,
        picture=picture,
        sweep=sweep,
    )
    try:
        _plan_run.run(options)
    except (PenstockError, ValueError, OSError, ImportError) as error:
        typer.echo(f"penstock plan: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
