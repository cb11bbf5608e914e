"""The command line: `penstock run | plan | partition | explain | probe | env | demo`.

Nothing here imports torch before a command needs it, so that `--help` answers at once and `env`
works when torch does not.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from typing import Annotated

import typer

import penstock
from penstock.cli._explain import ExplainOptions, explain
from penstock.cli._options import Interruption, add_command
from penstock.cli._partition import PartitionOptions, partition
from penstock.cli._plan import PlanOptions, plan
from penstock.cli._run import STORE_OPTION, STORE_VARIABLE, RunCommand, RunOptions, run
from penstock.cli.demo import DemoOptions, run_demo

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line of the process; the `penstock` script calls this."""
    errors = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Help has characters beyond ASCII; a script that is run gets its output back as it was.
        errors = sys.stdout.errors
        sys.stdout.reconfigure(errors="replace")
    try:
        app(prog_name="penstock", obj=errors)
    except Interruption:
        # Python itself ends by SIGINT after this exception, when it has left its modules.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """The format of an answer."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions(EnvOptions):
    """The tiers to measure, and when."""

    store: Annotated[str | None, STORE_OPTION] = None
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again instead of showing the last answer.")
    ] = False


def probe(options: ProbeOptions) -> None:
    """Measure how fast bytes move on this machine: memory, disk and, with a GPU, PCIe.

    Without a store the disk is left out. The answer is kept per machine and directory.

    **Examples**

    ```text
    penstock probe --store /mnt/nvme
    penstock probe --store /mnt/nvme --refresh --json
    ```
    """
    store = options.store or os.environ.get(STORE_VARIABLE) or None
    profile = penstock.probe(store, refresh=options.refresh)
    print(json.dumps(profile.to_dict(), indent=2) if options.as_json else profile)


def env(options: EnvOptions) -> None:
    """Show what Penstock finds on this machine, and what is wrong with it.

    The exit status is 1 if something is broken.

    Works when torch, the compiler or the cache directory do not; where typer or rich are missing,
    `python -m penstock.env` prints the same. Put its output into bug reports.

    **Examples**

    ```text
    penstock env
    penstock env --json
    ```
    """
    from penstock import env as environment

    sys.exit(environment.main(["--json"] if options.as_json else []))


add_command(
    app,
    "run",
    RunOptions,
    run,
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
)
add_command(app, "plan", PlanOptions, plan)
add_command(app, "partition", PartitionOptions, partition)
add_command(app, "explain", ExplainOptions, explain)
add_command(app, "probe", ProbeOptions, probe)
add_command(app, "env", EnvOptions, env)
add_command(app, "demo", DemoOptions, run_demo)
