"""The topics of the GPU suite: what is measured in which order, and for how long at most.

A topic is a script beside this file, or the tests; it has one step or several, so that little is
lost where one is cut off. All of them together fit into three calls of nine minutes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

NEEDED = ("highspy", "platformdirs", "peft", "transformers")
"""Requirements that a machine with torch and Triton may lack, or have too old; as wheels."""

_PLAN = ("highspy",)
_TESTS = (
    *("-p", "no:cacheprovider", "-p", "no:benchmark", "--continue-on-collection-errors", "-q"),
    *("--numprocesses", "logical", "--dist", "worksteal", "-o", "timeout=90"),
)
_ALONE = "tests/executor/test_fit_cuda.py::test_a_device_without_room_leaves_everything_as_it_was"
"""It takes all the memory that the GPU has left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a topic."""

    topic: str
    name: str
    seconds: int
    """It gets at most."""
    flags: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    """Below $PENSTOCK_DATA."""

    @property
    def key(self) -> str:
        """The step's name in tables and in device.json."""
        return f"{self.topic}: {self.name}"

    @property
    def least_seconds(self) -> float:
        """With less time left than this it is not begun."""
        return 0.6 * self.seconds

    @property
    def unit(self) -> str:
        """What it has a number of."""
        return "tests" if self.topic == "tests" else "cases and arms"

    def command(self, device: str, out: Path) -> list[str]:
        """Return the command line, after the interpreter."""
        if self.topic == "tests":
            return ["-m", "pytest", "-m", "gpu", *_TESTS, *self.flags]
        return [f"benchmarks/{self.topic}.py", "--device", device, "--out", str(out), *self.flags]

    def dry_command(self, device: str, out: Path) -> list[str]:
        """Return the command line that measures nothing."""
        dry = "--collect-only" if self.topic == "tests" else "--dry-run"
        return [*self.command(device, out), dry]

    def num_measurements(self, said: str) -> int:
        """Count what a dry run has said that it would measure."""
        if self.topic == "tests":
            # "490 tests collected in 2 s", with how many were deselected between.
            found = re.search(r"^(\d+)(?:/\d+)? tests? collected", said, re.MULTILINE)
            return int(found[1]) if found else 0
        return sum(_is_row(line) for line in said.splitlines())


def _is_row(line: str) -> bool:
    try:
        return set(json.loads(line)) == {"case", "arm"}
    except (ValueError, TypeError):
        return False


_OFFLOAD_ARMS = ("keep", "checkpoint", "save_on_cpu", "bare auto", "run auto", "bare auto+file")
STEPS = (
    Step(topic="smoke", name="all", seconds=90),
    Step(
        topic="tests",
        name="together",
        seconds=230,
        flags=("tests", "--deselect", _ALONE),
        packages=(*_PLAN, "xdist"),
    ),
    Step(topic="tests", name="alone", seconds=30, flags=(_ALONE,), packages=_PLAN),
    Step(topic="kv", name="kernel", seconds=30, flags=("--quick", "--part", "kernel")),
    Step(
        topic="kv",
        name="decode",
        seconds=30,
        flags=("--quick", "--part", "decode"),
        packages=("transformers",),
    ),
    Step(
        topic="offload",
        name="llama",
        seconds=160,
        flags=("--rounds", "1", "--shapes", "1", "--models", "llama", "--arms", *_OFFLOAD_ARMS),
        packages=("transformers",),
    ),
    Step(
        topic="execute",
        name="gpt2",
        seconds=220,
        flags=("--models", "gpt2", "--arms", "1/4 host", "--rounds", "1", "--time-limit", "10"),
        packages=("transformers", *_PLAN),
    ),
    Step(
        topic="rgnn",
        name="small graphs",
        seconds=150,
        flags=("--quick", "--part", "cases"),
        packages=("torch_geometric",),
        data=("rgnn",),
    ),
    Step(
        topic="offload",
        name="gpt2",
        seconds=140,
        flags=("--rounds", "1", "--models", "gpt2", "--arms", *_OFFLOAD_ARMS),
        packages=("transformers",),
    ),
    Step(
        topic="unified",
        name="grid",
        seconds=120,
        flags=("--part", "memory", "--no-footprints", "--row-bytes", "512", "4096"),
    ),
    Step(
        topic="lora",
        name="layers",
        seconds=70,
        flags=("--quick", "--part", "layers"),
        packages=("peft", "transformers"),
    ),
    Step(
        topic="batching",
        name="frontier",
        seconds=80,
        flags=("--part", "frontier"),
        data=("batching/tu/PROTEINS",),
    ),
    Step(
        topic="execute",
        name="resnet",
        seconds=160,
        flags=("--models", "resnet", "--arms", "1/4 host", "--rounds", "1", "--time-limit", "10"),
        packages=_PLAN,
    ),
    Step(
        topic="unified",
        name="epoch",
        seconds=80,
        flags=("--part", "epoch"),
        data=("graphs/tolokers.npz",),
    ),
)
TOPICS = tuple(dict.fromkeys(step.topic for step in STEPS))
