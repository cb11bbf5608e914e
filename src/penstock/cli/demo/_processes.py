"""The processes of the arms, which take turns."""

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
from typing import Any

from penstock.cli.demo._config import ARMS, PLANNED, ArmResult, DemoError, DemoOptions


def plan_arms(options: DemoOptions, plans: str) -> None:
    """Make the plans of the planned arms, in a process of their own."""
    planning = {"plans": plans, "store": options.store, "plan_seconds": options.plan_seconds}
    command = [sys.executable, *_list_script(options, **planning)]
    done = subprocess.run(command, capture_output=True, text=True, env=_make_environment())
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


def _make_environment() -> dict[str, str]:
    """Return variables with which no library tries to download."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


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
            env=_make_environment(),
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
