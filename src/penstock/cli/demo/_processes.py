"""Options of the demo, its arms, and their processes, which take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli._options import directory_option, hidden_option
from penstock.cli._run import MIN_BYTES_HELP
from penstock.errors import PenstockError

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
    plan_seconds: Annotated[int, hidden_option("Seconds for each plan.")] = 8

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
