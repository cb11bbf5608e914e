"""`penstock plan`: its options. What it does is in `_plan_run`, which loads when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock._cli_options import (
    NEEDS_VIZ,
    OPEN_TRACE,
    directory_option,
    file_option,
    name_option,
    number_option,
    size_option,
)

if TYPE_CHECKING:
    from penstock._plan_run import PlanOptions

_MODEL = typer.Argument(
    metavar="MODEL",
    help="A name such as gpt2 or llama-7b; a JSON file with a Transformers configuration or a "
    "saved step graph; or module:function.",
    show_default=False,
)
_DEVICE_MEMORY = size_option(
    "Memory of the device, such as 16GiB, or a share of what the program would need: 1/8, 25%. "
    "Default: as much as needed."
)
_HOST_MEMORY = size_option("Host memory to swap to. Default: the machine's.")
_STORE = directory_option("Directory on a fast local disk to swap to.")
_MACHINE = typer.Option(
    metavar="NAME",
    help="v100-16gb-pcie3, a100-80gb, h100-80gb or h200. Default: this machine.",
    show_default=False,
)
_BATCH = number_option("Samples of a batch.", min=1)
_SEQUENCE = number_option(
    "Tokens of a sample. Default: the model's longest, at most 1024.", min=1, show_default=False
)
_OPTIMIZER = name_option("adamw, adam, or sgd (with momentum).")
_DTYPE = name_option("Of parameters: float32, bfloat16, float16.")
_METHOD = name_option(
    "auto; exact, for up to 200 operators; genetic, SwapAdvisor's algorithm, to compare with."
)
_TIME_LIMIT = typer.Option(metavar="SECONDS", min=0.1, help="For a plan.")
_SWEEP = typer.Option("--sweep", help="Plan for less and less memory, until nothing fits.")
_SAVE = file_option("Write the plan (of a sweep: its points).")
_SAVE_GRAPH = file_option(
    "Write the captured step, as .json or .json.gz; it can be MODEL next time."
)
_TRACE = file_option(f"Write the step as a trace; {OPEN_TRACE}")
_PICTURE = file_option(f"Draw it {NEEDS_VIZ}")

_Optimizer = Literal["adamw", "adam", "sgd"]
_Dtype = Literal["float32", "bfloat16", "float16"]
_Method = Literal["auto", "exact", "genetic"]


def plan(
    model: Annotated[str, _MODEL],
    device_memory: Annotated[str | None, _DEVICE_MEMORY] = None,
    host_memory: Annotated[str | None, _HOST_MEMORY] = None,
    store: Annotated[str | None, _STORE] = None,
    machine: Annotated[str | None, _MACHINE] = None,
    batch: Annotated[int, _BATCH] = 8,
    sequence: Annotated[int | None, _SEQUENCE] = None,
    optimizer: Annotated[_Optimizer, _OPTIMIZER] = "adamw",
    dtype: Annotated[_Dtype, _DTYPE] = "float32",
    reorder: Annotated[bool, typer.Option(help="Operators may change their order.")] = True,
    recompute: Annotated[bool, typer.Option(help="Operators may run again.")] = True,
    method: Annotated[_Method, _METHOD] = "auto",
    time_limit: Annotated[float, _TIME_LIMIT] = 60.0,
    seed: Annotated[int, number_option("Of random choices.")] = 0,
    sweep: Annotated[bool, _SWEEP] = False,
    save: Annotated[Path | None, _SAVE] = None,
    save_graph: Annotated[Path | None, _SAVE_GRAPH] = None,
    trace: Annotated[Path | None, _TRACE] = None,
    picture: Annotated[Path | None, _PICTURE] = None,
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

    _run_or_exit(
        _plan_run.PlanOptions(
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
    )


def _run_or_exit(options: PlanOptions) -> None:
    """Turn errors that users can act on into a line and an exit status."""
    from penstock import _plan_run
    from penstock.errors import PenstockError

    try:
        _plan_run.run(options)
    except (PenstockError, ValueError, OSError, ImportError) as error:
        typer.echo(f"penstock plan: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo("penstock plan: interrupted before there was a plan; nothing is saved", err=True)
        raise typer.Exit(130) from error
