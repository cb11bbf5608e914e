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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli._options import INTERRUPTED
from penstock.cli.demo._processes import (
    ARMS,
    PLANNED,
    Arm,
    ArmResult,
    DemoConfig,
    DemoError,
    DemoOptions,
    list_commands,
    plan_arms,
    take_turns,
)
from penstock.memory import RAM_FILESYSTEMS, filesystem_type
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["ArmResult", "DemoError", "DemoOptions", "run_demo"]

# Seconds of a measured step in all arms together; a slower machine takes fewer steps.
_SECONDS_PER_ROUND = 60
# Slowest over fastest step of one arm; beyond this its times say more about the machine.
_UNSTEADY = 1.5


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
    bits = (stock.losses, stock.weights_sha256)
    different = [each for each in ours if (each.losses, each.weights_sha256) != bits]
    equal = not different
    console.print(_make_table(results, options))
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
    _draw(results, options, out / "memory.png")
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


def _make_table(results: Sequence[ArmResult], config: DemoConfig) -> Table:
    """Return memory, times and losses of all arms as a table."""
    from rich import box
    from rich.table import Table

    stock = results[0]
    table = Table(box=box.SIMPLE_HEAD, title=f"One model, trained in {len(results)} ways")
    table.add_column("", no_wrap=True)
    loss_heading = f"loss after {len(stock.losses)}"
    for heading in ("peak memory", "step time", "tokens/s", loss_heading):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        seconds = statistics.median(result.step_seconds)
        # Steps of the same round are compared: the machine was in the same state.
        pairs = zip(result.step_seconds, stock.step_seconds, strict=True)
        time_ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        peak_ratio = result.peak_bytes / max(stock.peak_bytes, 1)
        table.add_row(
            ARMS[result.arm],
            f"{format_bytes(result.peak_bytes)}  {peak_ratio:.2f}x",
            f"{format_seconds(seconds)}  {time_ratio:.2f}x",
            f"{config.tokens_per_step / seconds:,.0f}",
            f"{result.losses[-1]:.6f}",
        )
    table.caption = (
        "Peak memory: the parameters, and how far the process grew beyond the loaded model "
        "(VmHWM), with gradients and optimizer state; planned arms were given that share of what "
        "the step needs. Step time: median, and median ratio to the stock step of the "
        "same round."
    )
    table.caption_justify = "left"
    return table


def state_verdict(stock: ArmResult, ours: ArmResult, *, equal: bool) -> str:
    """Return a sentence about whether an arm has the bits of stock PyTorch."""
    num_equal = sum(a == b for a, b in zip(stock.losses, ours.losses, strict=True))
    if equal:
        return f"Stock and Penstock: all {num_equal} losses and the weights are equal bit for bit."
    weights = "equal" if stock.weights_sha256 == ours.weights_sha256 else "different"
    return (
        f"Stock and {ARMS[ours.arm]} DIFFER: {num_equal} of {len(stock.losses)} losses are equal "
        f"bit for bit, and the final weights are {weights}."
    )


def list_remarks(stock: ArmResult, num_steps: int) -> Iterator[str]:
    """Yield warnings about a machine whose times cannot be trusted."""
    if len(stock.step_seconds) < num_steps:
        yield f"The machine is slow: only {len(stock.step_seconds)} steps were measured."
    fastest, slowest = min(stock.step_seconds), max(stock.step_seconds)
    if slowest > _UNSTEADY * fastest:
        yield (
            "The machine was busy with something else: a stock step took between "
            f"{format_seconds(fastest)} and {format_seconds(slowest)}. Trust the ratios more than "
            "the seconds, and neither much."
        )


def _draw(results: Sequence[ArmResult], config: DemoConfig, path: Path) -> None:
    """Draw throughput against memory, of all arms."""
    from penstock.report import ComparisonPoint, draw_comparison

    points = [
        ComparisonPoint(
            ARMS[result.arm].removeprefix("planned, ").replace("Penstock", "offload"),
            result.peak_bytes,
            config.tokens_per_step / statistics.median(result.step_seconds),
            curve=result.arm in PLANNED,
        )
        for result in results
    ]
    title = f"GPT-2, {config.num_layers} layers of {config.hidden_size}, AdamW, on this machine"
    draw_comparison(points, path, title=title, curve="planned", unit="tokens/s")
