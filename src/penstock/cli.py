"""The command line: `penstock run | plan | probe | env | demo`.

Nothing here imports torch before a command needs it, so that `--help` answers at once and `env`
works when torch does not.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

import penstock
from penstock import _plan_command
from penstock._cli_options import (
    NEEDS_VIZ,
    OPEN_TRACE,
    directory_option,
    file_option,
    size_option,
)
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line of the process; what the `penstock` script calls."""
    app(prog_name="penstock")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _penstock(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Train past memory: saved activations leave for host memory or files and come back in time.

    **First steps**

    ```text
    penstock env                                  is everything in place?
    penstock demo                                 see what it does, in some minutes
    penstock run --store /mnt/nvme train.py       run your own script, unmodified
    ```
    """


_Store = Annotated[
    str | None,
    directory_option(
        "Directory on a fast local disk where activations go. Default: $PENSTOCK_STORE."
    ),
]
_DEVICE_MEMORY = size_option(
    "Most saved activations on the device at once, such as 8GiB (default: no limit); with --plan "
    "all that a step may take."
)
_HOST_MEMORY = size_option("Most host memory that Penstock may hold, such as 32GiB.")
_MIN_BYTES = typer.Option(metavar="SIZE", help="Smaller tensors stay where they are.")
_POLICY = typer.Option(
    help="auto: as much as hides behind the computation, or as --device-memory demands. "
    "all: everything."
)
_PLAN = typer.Option(
    "--plan",
    help="Instead of offloading, run the steps of the script's transformers.Trainer as planned for "
    "--device-memory. A loop of the script's own is refused before its first update; with "
    "--plan=auto it runs on as it is.",
)
_PLAN_AUTO = typer.Option("--plan-auto", hidden=True)  # what --plan=auto is read as
_TIME_LIMIT = typer.Option(metavar="SECONDS", help="For planning, with --plan.")
_REPORT = file_option("Write what happened as JSON, also when the script fails.")
_TRACE = file_option(f"Write the last step as a trace; {OPEN_TRACE}")
_PICTURE = file_option(f"Draw the last step {NEEDS_VIZ}")


class _RunCommand(TyperCommand):
    """`run`, whose flag `--plan` may have a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--plan=auto` before SCRIPT as a flag of its own."""
        before = list(itertools.takewhile(lambda each: each != "--", args))
        names = {"--plan=auto": "--plan-auto", "--plan=always": "--plan"}
        read = [names.get(each, each) for each in before] + args[len(before) :]
        # What stands behind SCRIPT is the script's own, and is given to it as it was.
        given = super().parse_args(ctx, read)
        if ctx.params.get("arguments"):
            num_own = len(ctx.params["arguments"])
            ctx.params["arguments"] = args[len(args) - num_own :]
        return given


@app.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="The script, or the module after -m.", show_default=False
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="The script's own arguments.", show_default=False),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module name, as in `python -m`.")
    ] = False,
    store: _Store = None,
    device_memory: Annotated[str | None, _DEVICE_MEMORY] = None,
    host_memory: Annotated[str | None, _HOST_MEMORY] = None,
    min_bytes: Annotated[str, _MIN_BYTES] = "1MiB",
    policy: Annotated[Literal["auto", "all"], _POLICY] = "auto",
    plan: Annotated[bool, _PLAN] = False,
    plan_auto: Annotated[bool, _PLAN_AUTO] = False,
    time_limit: Annotated[float, _TIME_LIMIT] = 60,
    report: Annotated[Path | None, _REPORT] = None,
    trace: Annotated[Path | None, _TRACE] = None,
    picture: Annotated[Path | None, _PICTURE] = None,
) -> None:
    """Run an unmodified training script with its activations offloaded, or its steps planned.

    The script runs as `python SCRIPT ARGS...` would run it: its arguments, exit status and
    tracebacks are its own. Options of Penstock stand before SCRIPT. torch is imported before the
    script starts, so set variables such as OMP_NUM_THREADS in the shell, not in the script.

    Without a GPU, activations go from RAM to a file in --store. With a GPU they go to host memory,
    and on to the file if --store is given. The file has no name and vanishes with the process.

    **Examples**

    ```text
    penstock run --store /mnt/nvme train.py --epochs 3
    penstock run --store /mnt/nvme --device-memory 8GiB --report out.json train.py
    penstock run --store /mnt/nvme -m my_package.train --lr 1e-4
    penstock run --plan --device-memory 4GiB --store /mnt/nvme finetune.py
    torchrun --nproc-per-node 2 -m penstock run --store /mnt/nvme --report out.json train.py
    ```

    With --plan the parameters, gradients, optimizer state and activations of a Trainer's step take
    --device-memory together; what does not fit lies in --host-memory, in --store, or is computed
    again. The losses and weights are the same.

    SCRIPT may be - for a script on standard input.

    With several ranks, as in the last line, each writes its own file: out.rank0.json,
    out.rank1.json.
    """
    from penstock import _launch

    config = _launch.Launch(
        target=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        store=store,
        device_memory=device_memory,
        host_memory=host_memory,
        min_bytes=min_bytes,
        policy=policy,
        plan=plan or plan_auto,
        plan_is_optional=plan_auto,
        time_limit=time_limit,
        report_path=report,
        trace_path=trace,
        picture_path=picture,
    )
    try:
        exit_code = _launch.launch(config)
    except _launch.LaunchError as error:
        _fail("run", error)
    sys.exit(exit_code)


app.command()(_plan_command.plan)


@app.command()
def probe(
    store: _Store = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again instead of showing the last answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure how fast bytes move on this machine: memory, disk and, with a GPU, PCIe.

    Without a store the disk is left out. The answer is kept per machine and directory.

    **Examples**

    ```text
    penstock probe --store /mnt/nvme
    penstock probe --store /mnt/nvme --refresh --json
    ```
    """
    try:
        profile = penstock.probe(store or os.environ.get("PENSTOCK_STORE") or None, refresh=refresh)
    except (PenstockError, ValueError, OSError, ImportError) as error:
        _fail("probe", error)
    print(json.dumps(profile.to_dict(), indent=2) if as_json else profile)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what Penstock finds on this machine, and what is wrong with it.

    Works when torch, the compiler or the cache directory do not; where typer or rich are missing,
    `python -m penstock.env` prints the same. Put its output into bug reports.

    **Examples**

    ```text
    penstock env
    penstock env --json
    ```
    """
    from penstock import env as environment

    sys.exit(environment.main(["--json"] if as_json else []))


def _hidden_option(help_text: str) -> Any:
    """An option for tests and for the curious; `--help` would drown in them."""
    return typer.Option(help=help_text, hidden=True, min=1)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the timeline and the numbers are written.")
    ] = Path("penstock-demo"),
    store: Annotated[
        str | None,
        directory_option("Directory for the activations. Default: a temporary one inside --out."),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured steps per arm, after one warm-up.")
    ] = 6,
    policy: Annotated[
        Literal["auto", "all"], typer.Option(help="What leaves; see penstock run --help.")
    ] = "auto",
    hidden_size: Annotated[int, _hidden_option("Width of the model.")] = 512,
    layers: Annotated[int, _hidden_option("Transformer layers.")] = 4,
    heads: Annotated[int, _hidden_option("Attention heads.")] = 8,
    sequence_length: Annotated[int, _hidden_option("Bytes per sequence.")] = 512,
    batch_size: Annotated[int, _hidden_option("Sequences per step.")] = 8,
    min_bytes: Annotated[
        str, typer.Option(hidden=True, help="Smaller tensors stay where they are.")
    ] = "1MiB",
    plan_seconds: Annotated[int, _hidden_option("Seconds for each plan.")] = 8,
) -> None:
    """Train a small GPT-2 and compare: stock, checkpointing, Penstock, and planned steps in 1/2,
    1/4 and 1/8 of the memory.

    Each way runs in a process of its own, and they take turns, a step each. They learn from the
    Python sources of this machine; nothing is downloaded. Together they need about 8 GB. Shown are
    peak memory as the operating system saw it, step time, and the losses, which must be equal
    bit for bit. The last step of Penstock is drawn, and written as a trace for
    https://ui.perfetto.dev.

    **Examples**

    ```text
    penstock demo
    penstock demo --steps 20 --out results --store /mnt/nvme
    ```
    """
    from penstock import demo as demonstration

    config = demonstration.DemoConfig(
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=heads,
        sequence_length=sequence_length,
        batch_size=batch_size,
    )
    try:
        equal = demonstration.run_demo(
            config,
            num_steps=steps,
            out=out,
            store=store,
            policy=policy,
            min_bytes=min_bytes,
            plan_seconds=plan_seconds,
        )
    except (PenstockError, ValueError, OSError, ImportError) as error:
        _fail("demo", error)
    except KeyboardInterrupt:
        sys.exit(130)
    if not equal:
        _fail("demo", "the losses differ: that is a bug in Penstock, please report it")


def _fail(command: str, error: Exception | str) -> NoReturn:
    print(f"penstock {command}: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
