"""`penstock explain`: the bytes of a function at each level of memory, and the level that binds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli._functions import frames_of_user, import_function
from penstock.cli._options import NEEDS_VIZ, file_option, name_option, number_option
from penstock.cli._results import check_results, write_results


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The function, its base, and what is shown."""

    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="module:function, of a module in this directory or one that is installed; the "
            "function takes no arguments.",
            show_default=False,
        ),
    ]
    base: Annotated[
        str | None, name_option("The function that it is a variant of: module:function.")
    ] = None
    machine: Annotated[
        str | None,
        name_option("Rates of another machine, such as h100-80gb, instead of those measured here."),
    ] = None
    repetitions: Annotated[
        int, number_option("Times that each function runs; 0 measures nothing.", min=0)
    ] = 7
    picture: Annotated[Path | None, file_option(f"Write the roofline {NEEDS_VIZ}")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False


def explain(options: ExplainOptions) -> None:
    """Count a function's bytes at each level of memory, and show which level its time follows.

    Kernels of Triton are counted with TRITON_INTERPRET=1 in the environment. With a base, the
    gains are shown, and whether bytes fell at a level that does not bind.

    **Examples**

    ```text
    penstock explain model:step
    penstock explain kernels:fused --base kernels:separate --picture roofline.png
    ```
    """
    from penstock import iomodel, memory

    check_results(picture=options.picture)
    function = import_function(options.function)
    base = None if options.base is None else import_function(options.base)
    machine = None if options.machine is None else memory.machine(options.machine)
    with frames_of_user():
        report = iomodel.explain(
            function, base=base, machine=machine, repetitions=options.repetitions
        )
    print(json.dumps(report.to_dict(), indent=2) if options.as_json else report)
    done = write_results("penstock explain", {"picture": (options.picture, report.draw)})
    if options.picture is not None and not done:
        sys.exit(2)
