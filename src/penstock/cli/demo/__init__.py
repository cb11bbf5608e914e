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
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._options import Interruption, directory_option, hidden_option
from penstock.cli._run import MIN_BYTES_HELP
from penstock.compat.packages import is_installed
from penstock.errors import PenstockError
from penstock.memory import RAM_FILESYSTEMS, filesystem_type
from penstock.memory.files import replace_file
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["ArmResult", "DemoError", "DemoOptions", "run_demo"]

# Seconds of a measured step in all arms together; a slower machine takes fewer steps.
_SECONDS_PER_ROUND = 60
# Slowest over fastest step of one arm; beyond this its times say more about the machine.
_UNSTEADY = 1.5
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # no library tries to download
PLANNED = {f"planned-{divisor}": divisor for divisor in (2, 4, 8)}
"""Planned arms, with the divisors of the memory that the program itself needs."""
ARMS = {
    "stock": "stock PyTorch",
    "checkpoint": "checkpointing",
    "penstock": "Penstock",
    **{name: f"planned, 1/{divisor}" for name, divisor in PLANNED.items()},
}


class DemoError(PenstockError):
    """The demo cannot go on; after the death of a process, the message holds its last words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model and its training; the same in every arm."""

    hidden_size: Annotated[int, hidden_option("Width of the model.")] = 512
    num_layers: Annotated[int, hidden_option("Transformer layers.", "--layers")] = 4
    num_heads: Annotated[int, hidden_option("Attention heads.", "--heads")] = 8
    sequence_length: Annotated[int, hidden_option("Bytes of text in one sequence.")] = 512
    batch_size: Annotated[int, hidden_option("Sequences in one step.")] = 8
    seed: int = 0
    """Seed of the weights and of the choice of text."""

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step trains on."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions(DemoConfig):
    """The model, and how the demo runs."""

    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the timeline and the numbers are written.")
    ] = Path("penstock-demo")
    store: Annotated[
        str | None,
        directory_option("Directory for the activations. Default: a temporary one inside --out."),
    ] = None
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured steps per arm, after one warm-up.")
    ] = 6
    policy: Annotated[
        Literal["auto", "all"], typer.Option(help="What leaves; see penstock run --help.")
    ] = "auto"
    min_bytes: Annotated[str, typer.Option(hidden=True, help=MIN_BYTES_HELP)] = "1MiB"
    plan_seconds: Annotated[
        float, typer.Option(hidden=True, min=0.01, help="Seconds for each plan.")
    ] = 8.0

    @property
    def model(self) -> DemoConfig:
        """The model and its training alone."""
        names = [field.name for field in dataclasses.fields(DemoConfig)]
        return DemoConfig(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """Measurements of one arm, as its process reported them."""

    arm: str
    """``"stock"``, ``"checkpoint"``, ``"penstock"`` or ``"planned-8"`` and its like."""
    peak_bytes: int
    """The parameters, and how far the operating system saw the process grow beyond the loaded
    model, at most."""
    step_seconds: tuple[float, ...]
    """Duration of every measured step."""
    losses: tuple[float, ...]
    """Loss of every step, the warm-up first."""
    weights_sha256: str
    """Digest of all weights after the last step."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)


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
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        is_equal = _compare_arms(options)
    except KeyboardInterrupt as error:
        raise Interruption from error
    finally:
        signal.signal(signal.SIGTERM, before)
    if not is_equal:
        raise DemoError("the losses differ: that is a bug in Penstock, please report it")


def _exit(number: int, _: object) -> None:
    """End the process as a signal would, with its processes ended and its folders removed."""
    sys.exit(128 + number)


def _compare_arms(options: DemoOptions) -> bool:
    """Run all arms and show the comparison; return True if all bits are those of stock PyTorch.

    The directory `out` gets ``memory.png`` (the comparison), ``timeline.png``,
    ``timeline.trace.json``, ``report.json`` (of `penstock run`) and ``demo.json`` (the numbers of
    the table).
    """
    from rich.console import Console

    for package in ("transformers", "matplotlib"):
        if not is_installed(package):
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
    replace_file(out / "demo.json", json.dumps(numbers, indent=2) + "\n")
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
    from penstock.report import ComparisonPoint, draw_comparison

    points = [
        ComparisonPoint(
            ARMS[result.arm].removeprefix("planned, "),
            result.peak_bytes,
            config.tokens_per_step / statistics.median(result.step_seconds),
            curve=result.arm in PLANNED,
        )
        for result in results
    ]
    title = f"GPT-2, {config.num_layers} layers of {config.hidden_size}, AdamW, on this machine"
    draw_comparison(points, path, title=title, curve="planned", unit="tokens/s")


def plan_arms(options: DemoOptions, plans: str) -> None:
    """Make the plans of the planned arms, in a process of their own."""
    planning = {"plans": plans, "store": options.store, "plan_seconds": options.plan_seconds}
    command = [sys.executable, *_list_script(options, **planning)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _OFFLINE)
    if done.returncode:
        raise DemoError(f"planning failed; its last words:\n{done.stderr[-2000:]}")


def take_turns(
    arms: Sequence[Arm], num_steps: int, deadline: float, tell: Callable[[str, int], None]
) -> None:
    """Let every arm take a step in every round, the first round unmeasured."""
    tell("processes load torch and the model", 0)
    for arm in arms:
        arm.wait_until_loaded()
    longest_seconds = 0.0
    for round_index in range(1 + num_steps):
        start = time.monotonic()
        # Two measured rounds are the fewest that make a median of anything.
        if round_index > 2 and start + longest_seconds > deadline:
            return
        first = round_index % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            event = arm.take_step()
            tell(
                f"{ARMS[arm.name]:<13}  step {round_index + 1} of {1 + num_steps}  "
                f"{event['seconds']:5.1f} s  loss {event['loss']:.3f}",
                1,
            )
        longest_seconds = max(longest_seconds, time.monotonic() - start)


def list_commands(options: DemoOptions, plans: str) -> dict[str, list[str]]:
    """Return the command line of every arm, in the order in which they run."""
    out = options.out
    run = ["-m", "penstock", "run", "--store", str(options.store), "--policy", options.policy]
    run += ["--min-bytes", options.min_bytes, "--report", str(out / "report.json")]
    run += ["--trace", str(out / "timeline.trace.json"), "--picture", str(out / "timeline.png")]
    arms = {
        "stock": _list_script(options),
        "checkpoint": _list_script(options, checkpoint=True),
        "penstock": [*run, *_list_script(options)],
    }
    for name in PLANNED:
        arms[name] = _list_script(options, plans=plans, store=options.store, planned=name)
    return {name: [sys.executable, *arguments] for name, arguments in arms.items()}


def _list_script(options: DemoOptions, **arm: Any) -> list[str]:
    """Return the training script as arguments of an interpreter."""
    request = {"config": dataclasses.asdict(options.model), **arm}
    return ["-m", "penstock.cli.demo._training", json.dumps(request)]


class Arm:
    """The process of one arm; it takes one step per line of its standard input."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._losses: list[float] = []
        self._seconds: list[float] = []
        # Closed by __exit__, like the process that writes to it.
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=os.environ | _OFFLINE,
        )

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            assert stream is not None
            # The process may be gone, with a line for it still in our buffer.
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def wait_until_loaded(self) -> None:
        """Wait until the model is loaded and nothing has been trained yet."""
        self._next_event()

    def take_step(self) -> dict[str, Any]:
        """Train one step; return its ``seconds`` and ``loss``."""
        assert self._process.stdin is not None
        # A process that has died is reported by the read that follows, with its last words.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        event = self._next_event()
        self._losses.append(event["loss"])
        self._seconds.append(event["seconds"])
        return event

    def finish(self) -> ArmResult:
        """Let the process end, and return what it reported."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        event = self._next_event()
        if self._process.wait() != 0:
            raise self._make_error()
        return ArmResult(
            arm=self.name,
            peak_bytes=event["peak_bytes"],
            step_seconds=tuple(self._seconds[1:]),
            losses=tuple(self._losses),
            weights_sha256=event["weights_sha256"],
        )

    def _next_event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        raise self._make_error()

    def _make_error(self) -> DemoError:
        self._complaints.seek(0)
        last_lines = "".join(self._complaints.readlines()[-20:])
        return DemoError(
            f"the arm {ARMS[self.name]!r} ended with exit status {self._process.returncode}; "
            f"its last words:\n{last_lines}"
        )
