"""`penstock run`: an unmodified training script, as `python` runs it, in less memory.

The order matters. The process is set up first (the allocator, before the script makes its first
tensor), then the store is opened, then the script becomes `__main__` (`_script.py`). A mode
surrounds it: offloading, or planned steps of its trainers. The report is written at
every end of the script, also after an exception or Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from penstock.cli._options import (
    INTERRUPTED,
    NEEDS_VIZ,
    OPEN_TRACE,
    Interruption,
    directory_option,
    file_option,
    size_option,
)
from penstock.cli._results import (
    STANDARD_OUTPUT,
    check_results,
    write_results,
    write_text,
)
from penstock.cli._script import Ending, Offloading, Planning, Script, run_script, say
from penstock.cli._vector_math import settle_vector_math
from penstock.errors import PenstockError
from penstock.memory.files import is_replaceable
from penstock.units import parse_bytes

logger = logging.getLogger(__name__)

STORE_VARIABLE = "PENSTOCK_STORE"

STORE_OPTION = directory_option(
    "Directory on a fast local disk where activations go. Default: $PENSTOCK_STORE."
)
POLICY_OPTION = typer.Option(
    help="auto: as much as hides behind the computation, or as --device-memory demands. "
    "all: everything."
)
MIN_BYTES_HELP = "Smaller tensors stay where they are."


class LaunchError(PenstockError):
    """A script cannot be started: wrong arguments, no store, no such file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The script, and how it runs."""

    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="The script, or the module after -m.", show_default=False
        ),
    ]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="The script's own arguments.", show_default=False),
    ] = None
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module name, as in `python -m`.")
    ] = False
    store: Annotated[str | None, STORE_OPTION] = None
    device_memory: Annotated[
        str | None,
        size_option(
            "Most saved activations on the device at once, such as 8GiB (default: no limit); with "
            "--plan all that a step may take."
        ),
    ] = None
    host_memory: Annotated[
        str | None, size_option("Most host memory that Penstock may hold, such as 32GiB.")
    ] = None
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help=MIN_BYTES_HELP)] = "1MiB"
    policy: Annotated[Literal["auto", "all"], POLICY_OPTION] = "auto"
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Instead of offloading, run the steps of the script's transformers.Trainer as "
            "planned for --device-memory. A loop of the script's own is refused before its first "
            "update; with --plan=auto it runs on as it is.",
        ),
    ] = False
    plan_auto: Annotated[bool, typer.Option("--plan-auto", hidden=True)] = False
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="For planning, with --plan.")
    ] = 60
    report: Annotated[
        Path | None,
        file_option(
            "Write what happened as JSON, also when the script fails; - is standard output."
        ),
    ] = None
    trace: Annotated[Path | None, file_option(f"Write the last step as a trace; {OPEN_TRACE}")] = (
        None
    )
    picture: Annotated[Path | None, file_option(f"Draw the last step {NEEDS_VIZ}")] = None

    @property
    def is_planned(self) -> bool:
        """True if steps run as planned instead of offloaded."""
        return self.plan or self.plan_auto

    @property
    def target(self) -> Script:
        """The script by itself."""
        return Script(self.script, tuple(self.arguments or ()), self.module)


class RunCommand(TyperCommand):
    """`run`, with a flag `--plan` that may have a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--plan=auto` before SCRIPT as a flag of its own."""
        before = list(itertools.takewhile(lambda each: each != "--", args))
        names = {"--plan=auto": "--plan-auto", "--plan=always": "--plan"}
        read = [names.get(each, each) for each in before] + args[len(before) :]
        # The arguments behind SCRIPT are the script's own, and are passed to it unchanged.
        remaining = super().parse_args(ctx, read)
        if ctx.params.get("arguments"):
            num_own = len(ctx.params["arguments"])
            ctx.params["arguments"] = args[len(args) - num_own :]
        return remaining

    def invoke(self, ctx: Any) -> Any:
        """Run with the standard output of `python`, whose handler of errors is the context's."""
        if ctx.obj is not None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors=ctx.obj)
        return super().invoke(ctx)


def run(options: RunOptions) -> None:
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
    exit_code = launch(options)
    if exit_code == INTERRUPTED:
        raise Interruption
    sys.exit(exit_code)


def launch(options: RunOptions) -> int:
    """Run a script, offloaded or planned, and write the results that the options name.

    Returns:
        The exit status: the script's own, 1 after an uncaught exception, -2 after Ctrl-C.

    Raises:
        PenstockError, ValueError, OSError, ImportError: The script was not started; the message
            says why and what to do.
    """
    options = _resolve(options)
    setup = set_up_process(is_planned=options.is_planned)
    mode = _open_mode(options)
    process_id = os.getpid()
    start = time.perf_counter()
    ending = run_script(options.target, mode)
    if os.getpid() != process_id:
        # A child of os.fork that ran to the end of the script: the report is the parent's.
        return ending.finish()
    try:
        _write_results(options, mode, setup, ending, time.perf_counter() - start)
    except Exception:  # the script's own end must be seen, whatever became of the report
        logger.exception("penstock run: the report could not be written")
    return ending.finish()


def set_up_process(*, is_planned: bool) -> dict[str, str]:
    """Prepare the process before the script makes its first tensor.

    Returns the allocator of tensors on the CPU ("caching" or "stock") and the reason for it.

    The kernels of the CPU's vector mathematics are chosen while there is one thread, so that the
    run can be repeated. On a machine without a GPU the caching allocator replaces torch's: bytes
    that offloading frees then go back to the operating system or to the next tensor, and not into
    the C library's heap.
    """
    import torch

    settle_vector_math()
    kind = "stock"
    if is_planned:
        reason = "planned steps have an arena of their own"
    elif torch.cuda.is_available():
        reason = "activations live on the GPU"
    else:
        from penstock.memory import CachingAllocator  # builds C++; a GPU machine needs none of it

        allocator = CachingAllocator.instance()
        # For good, without a release: the script's tensors may outlive every block.
        if allocator.acquire():
            kind, reason = "caching", "activations live in RAM"
        else:
            reason = allocator.reason
    return {"allocator": kind, "reason": reason}


def _resolve(options: RunOptions) -> RunOptions:
    """Find everything wrong with the options that can be found without importing torch."""
    for name in ("device_memory", "host_memory", "min_bytes"):
        value = getattr(options, name)
        if value is not None:
            parse_bytes(value, name=f"--{name.replace('_', '-')}")
    if not options.target.exists():
        raise LaunchError(
            f"cannot open {options.script!r}: no such file. Options of penstock run stand before "
            "the script; a module is run with -m."
        )
    if options.is_planned and options.device_memory is None:
        raise LaunchError("--plan needs --device-memory, such as 8GiB: what a step may take")
    if options.is_planned and (options.trace or options.picture):
        raise LaunchError("--trace and --picture show offloading; with --plan there is --report")
    offloading, planning = ("policy", "min_bytes"), ("time_limit",)
    for name in offloading if options.is_planned else planning:
        if getattr(options, name) != getattr(RunOptions, name):
            option = f"--{name.replace('_', '-')}"
            place = "with" if options.is_planned else "without"
            raise LaunchError(f"{option} has no effect {place} --plan; leave it out")
    names = ("report", "trace", "picture")
    paths = {name: _resolve_path(getattr(options, name)) for name in names}
    if options.report == STANDARD_OUTPUT:
        paths["report"] = STANDARD_OUTPUT
    check_results(**paths)
    store = options.store or os.environ.get(STORE_VARIABLE) or None
    return dataclasses.replace(options, store=store, **paths)


def _resolve_path(path: Path | None) -> Path | None:
    """Return a result's path: absolute, as the script may change directory, and of this rank."""
    if path is None:
        return None
    path, rank = path.absolute(), _find_rank()
    if rank is None or path.is_dir() or (path.exists() and not is_replaceable(path)):
        return path  # all ranks may write to one device or pipe
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _find_rank() -> str | None:
    """Return the rank of this process among several that torchrun started; None if alone."""
    if os.environ.get("WORLD_SIZE") == "1":
        return None
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or None


def _open_mode(options: RunOptions) -> Offloading | Planning:
    if options.is_planned:
        names = ("device_memory", "host_memory", "store", "time_limit")
        chosen = {name: getattr(options, name) for name in names}
        return Planning(chosen, is_optional=options.plan_auto)
    import torch

    import penstock

    if options.store is None and not torch.cuda.is_available():
        raise LaunchError(
            "no store: this machine has no GPU, so saved activations lie in RAM and can only leave "
            f"to a file. Pass --store DIR or set {STORE_VARIABLE}, to a directory on a fast local "
            "disk (not a tmpfs such as /dev/shm: that is RAM again)."
        )
    offload = penstock.offload(
        options.store,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        min_bytes=options.min_bytes,
        policy=options.policy,
    )
    return Offloading(offload, options.trace, options.picture)


def _write_results(
    options: RunOptions,
    mode: Offloading | Planning,
    setup: dict[str, str],
    ending: Ending,
    duration_seconds: float,
) -> None:
    import penstock

    entries, lines, drawn = mode.results()
    if not mode.has_trained and (not ending.has_started or ending.speak is not None):
        lines = []  # what went wrong is said alone
    rank = _find_rank()
    content = {
        "penstock_version": penstock.__version__,
        "target": options.script,
        "arguments": list(options.arguments or ()),
        "is_module": options.module,
        "rank": rank,
        "exit_code": ending.exit_code,
        "exception": ending.exception,
        "duration_seconds": duration_seconds,
        "arrangement": setup,
        **entries,
    }
    text = json.dumps(content, indent=2) + "\n"
    done = write_results(
        "penstock run",
        {"report": (options.report, lambda path: write_text(path, text)), **drawn},
    )
    written = [f"{name} in {path}" for name, path in done.items() if path != STANDARD_OUTPUT]
    prefix = "penstock" if rank is None else f"penstock rank {rank}"
    for line in lines + ([", ".join(written)] if written else []):
        say(f"{prefix}: {line}")
