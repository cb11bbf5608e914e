"""`penstock demo`: one small GPT-2, trained in several ways, to see what Penstock does.

Read it in two halves. `_training.py` is an ordinary training script, run in a process of its own;
for the arm "penstock" the very same script is started by `penstock run`, and for the planned arms
its step is a planned one, for a share of the memory. `run_demo` starts those processes and compares
what they report. The processes take turns, a step each: a machine that is busy with something else
for a while then slows all of them alike, and the ratio of two steps of one round still means
something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli._options import INTERRUPTED
from penstock.cli.demo._comparison import draw, is_same, list_remarks, make_table, state_verdict
from penstock.cli.demo._config import ARMS, PLANNED, ArmResult, DemoError, DemoOptions
from penstock.cli.demo._processes import Arm, list_commands, plan_arms, take_turns
from penstock.memory import RAM_FILESYSTEMS, filesystem_type

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ArmResult", "DemoError", "DemoOptions", "run_demo"]

# Seconds of a measured step in all arms together; a slower machine takes fewer steps.
_SECONDS_PER_ROUND = 60


def run_demo(options: DemoOptions) -> None:
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
    try:
        is_equal = compare_arms(options)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if not is_equal:
        raise DemoError("the losses differ: that is a bug in Penstock, please report it")


def compare_arms(options: DemoOptions) -> bool:
    """Run all arms, print the comparison, draw it, write the timeline of Penstock's last step.

    The directory `out` gets ``memory.png`` (the comparison), ``timeline.png``,
    ``timeline.trace.json``, ``report.json`` (of `penstock run`) and ``demo.json`` (the numbers of
    the table). Returns True if Penstock's losses and weights are those of stock PyTorch, bit for
    bit.

    Raises:
        DemoError: An arm did not finish, or a package is missing.
        OSError: `out` cannot be written.
    """
    from rich.console import Console

    for package in ("transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"{package} is not installed: pip install 'penstock[demo]'")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    options = dataclasses.replace(options, out=out)
    console = Console()
    console.print(
        f"A byte-level GPT-2 ({options.num_layers} layers, width {options.hidden_size}) learns "
        f"Python, {options.batch_size} x {options.sequence_length} tokens a step, in "
        f"{len(ARMS)} processes that take turns: 1 + {options.steps} steps each."
    )
    results = _run_arms(options, console)
    return _show(results, options, console)


def _run_arms(options: DemoOptions, console: Console) -> list[ArmResult]:
    start, out = time.monotonic(), options.out
    with contextlib.ExitStack() as stack:
        store = options.store
        if store is None:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=out))
        if filesystem_type(store) in RAM_FILESYSTEMS:
            console.print(
                f"{store} lies in RAM: offloading to it frees nothing. Choose --out or --store "
                "on a disk.",
                style="yellow",
            )
        options = dataclasses.replace(options, store=store)
        plans = stack.enter_context(tempfile.TemporaryDirectory(prefix="plans-", dir=out))
        console.print(f"Its step is planned for {len(PLANNED)} shares of the memory first.")
        plan_arms(options, plans)
        commands = list_commands(options, plans)
        num_turns = len(commands) * (1 + options.steps)
        tell = stack.enter_context(_show_progress(console, num_turns=num_turns))
        arms = [stack.enter_context(Arm(name, command)) for name, command in commands.items()]
        take_turns(arms, options.steps, start + options.steps * _SECONDS_PER_ROUND, tell)
        return [arm.finish() for arm in arms]


def _show(results: Sequence[ArmResult], options: DemoOptions, console: Console) -> bool:
    """Print, draw and write the results; return whether all bits are stock's."""
    out = options.out
    stock, _, *ours = results
    different = [each for each in ours if not is_same(stock, each)]
    equal = not different
    console.print(make_table(results, options))
    for each in different or ours[:1]:
        console.print(state_verdict(stock, each, equal=equal))
    for remark in list_remarks(stock, options.steps):
        console.print(remark, style="yellow")
    numbers = {
        "config": dataclasses.asdict(options.model),
        "policy": options.policy,
        "bitwise_equal": equal,
        "arms": [result.to_dict() for result in results],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    draw(results, options, out / "memory.png")
    print(f"\nThroughput against memory:\n  picture  {out / 'memory.png'}")
    console.print("\nThe last step of Penstock:")
    # Paths are printed as they are: rich would break them at the width of the terminal.
    print(f"  picture  {out / 'timeline.png'}")
    print(f"  trace    {out / 'timeline.trace.json'} (open it with https://ui.perfetto.dev)")
    print(f"  report   {out / 'report.json'}")
    return equal


@contextlib.contextmanager
def _show_progress(console: Console, *, num_turns: int) -> Iterator[Callable[[str, int], None]]:
    """Show a live bar on a terminal, a line per step elsewhere; yield the function to call."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        # print, not console.print: a log file wants each line whole and at once.
        yield lambda text, _: print(text, flush=True)
        return
    columns = [TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=num_turns)
        yield lambda text, done: progress.update(task, description=text, advance=done)
