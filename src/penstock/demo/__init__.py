"""`penstock demo`: one small GPT-2, trained in several ways, so that anybody can see what Penstock
does.

Read it in two halves. `_training.py` is an ordinary training script, run in a process of its own as
`python -m penstock.demo`; for the arm "penstock" the very same script is started by `penstock run`,
and for the planned arms its step is a planned one, for a share of the memory. `run_demo` starts
those processes and compares what they report. The processes take turns, a step each: a machine that
is busy with something else for a while then slows all of them alike, and the ratio of two steps of
one round still means something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import env
from penstock.demo._comparison import draw, is_same, remarks, table_of, verdict
from penstock.demo._config import ARMS, ArmResult, DemoConfig, DemoError
from penstock.demo._plans import DIVISORS
from penstock.demo._processes import Arm, commands_of, plan_arms, take_turns

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ArmResult", "DemoConfig", "DemoError", "run_demo"]

# What a measured step may take in all arms together; a machine that needs longer takes fewer steps.
_SECONDS_PER_ROUND = 60


def run_demo(
    config: DemoConfig,
    *,
    num_steps: int = 6,
    out: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    min_bytes: str = "1MiB",
    plan_seconds: int = 8,
) -> bool:
    """Run all arms, print the comparison, draw it, write the timeline of Penstock's last step.

    Example:
        >>> run_demo(DemoConfig(), out="penstock-demo")  # doctest: +SKIP
        True

    Args:
        config: model and training.
        num_steps: measured steps of every arm, after one that is not; fewer on a machine so slow
            that six of them would take six minutes.
        out: directory for ``memory.png`` (the comparison), ``timeline.png``,
            ``timeline.trace.json``, ``report.json`` (of `penstock run`) and ``demo.json`` (the
            table's numbers).
        store: directory for what leaves the memory; by default a temporary one inside `out`.
        policy: ``"auto"`` or ``"all"``; see `penstock.offload`.
        min_bytes: smaller tensors stay where they are.
        plan_seconds: for each of the plans.

    Returns:
        Whether Penstock's losses and weights are those of stock PyTorch, bit for bit.

    Raises:
        DemoError: an arm did not finish, or a package is missing.
        OSError: `out` cannot be written.
    """
    from rich.console import Console

    for package in ("transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"{package} is not installed: pip install 'penstock[demo]'")
    start = time.monotonic()
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(
        f"A byte-level GPT-2 ({config.num_layers} layers, width {config.hidden_size}) learns "
        f"Python, {config.batch_size} x {config.sequence_length} tokens a step, in "
        f"{len(ARMS)} processes that take turns: 1 + {num_steps} steps each."
    )
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=out))
        if env.filesystem_type(os.fspath(store)) in env.MEMORY_FILESYSTEMS:
            console.print(
                f"{store} lies in RAM: offloading to it frees nothing. Choose --out or --store "
                "on a disk.",
                style="yellow",
            )
        plans = stack.enter_context(tempfile.TemporaryDirectory(prefix="plans-", dir=out))
        console.print(f"Its step is planned for {len(DIVISORS)} shares of the memory first.")
        plan_arms(config, plans, store, plan_seconds)
        commands = commands_of(config, out, plans, store=store, policy=policy, min_bytes=min_bytes)
        tell = stack.enter_context(_progress(console, num_turns=len(commands) * (1 + num_steps)))
        arms = [stack.enter_context(Arm(name, command)) for name, command in commands.items()]
        take_turns(arms, num_steps, start + num_steps * _SECONDS_PER_ROUND, tell)
        results = [arm.finish() for arm in arms]

    return _compare(results, config, num_steps, policy, out, console)


def _compare(
    results: Sequence[ArmResult],
    config: DemoConfig,
    num_steps: int,
    policy: str,
    out: Path,
    console: Console,
) -> bool:
    """Say, draw and write down what came of it; return whether all bits are stock's."""
    stock, _, *ours = results
    different = [each for each in ours if not is_same(stock, each)]
    equal = not different
    console.print(table_of(results, config))
    for each in different or ours[:1]:
        console.print(verdict(stock, each, equal=equal))
    for remark in remarks(stock, num_steps):
        console.print(remark, style="yellow")
    numbers = {
        "config": dataclasses.asdict(config),
        "policy": policy,
        "bitwise_equal": equal,
        "arms": [result.to_dict() for result in results],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    draw(results, config, out / "memory.png")
    print(f"\nThroughput against memory:\n  picture  {out / 'memory.png'}")
    console.print("\nThe last step of Penstock:")
    # Paths are printed as they are: rich would break them at the width of the terminal.
    print(f"  picture  {out / 'timeline.png'}")
    print(f"  trace    {out / 'timeline.trace.json'} (open it with https://ui.perfetto.dev)")
    print(f"  report   {out / 'report.json'}")
    return equal


@contextlib.contextmanager
def _progress(console: Console, *, num_turns: int) -> Iterator[Callable[[str, int], None]]:
    """A live bar on a terminal, one line per step elsewhere; yields what to call per step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        # print, not console.print: a log file wants each line whole and at once.
        yield lambda text, _: print(text, flush=True)
        return
    columns = [TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=num_turns)
        yield lambda text, done: progress.update(task, description=text, advance=done)
