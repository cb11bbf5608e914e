"""What every benchmark writes: one row per case and arm, with all that is needed to judge it later.

Rows live in `results/<device>/<topic>.json`, one row a line: a plain diff compares two runs.
Every topic is a script beside this file that takes `--device` and `--out` and calls `write_rows` as
soon as it has rows, so that a run that is cut off loses only what it had not measured.
Files whose name starts with an underscore are not topics.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

# What can change a result; absent packages are left out of a row.
_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "trl",
    "torch-geometric",
    "scipy",
    "kvikio-cu13",
)


class Environment(TypedDict):
    """The fields of a row that say where it was measured; `environment()` fills them."""

    device_name: str
    versions: dict[str, str]
    commit: str
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """What a result is held against: a bar, a bandwidth, a bound that nothing can pass."""

    name: str
    """In words: "1.10 x the fastest stock arm"."""
    value: float
    unit: str
    """"s", "B", "B/s" or "1" for a ratio."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """One case in one arm, measured several times."""

    topic: str
    """The benchmark: the name of its file."""
    case: str
    """What was run: "gpt2 hidden 512 layers 4 seq 512 batch 4"."""
    arm: str
    """How it was run: "keep", "checkpoint", "offload all"."""
    device_name: str
    versions: dict[str, str]
    commit: str
    """Commit of the source; "-dirty" where files differed from it, "unknown" without git."""
    command: str
    """What to type, in the repository root, to measure this row again."""
    num_repetitions: int
    median_seconds: float
    quartiles_seconds: tuple[float, float]
    """The lower and the upper quartile; both are the median where there was one repetition."""
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes moved per link, for one repetition: {"device->file": 1048576}."""
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Largest number of resident bytes per tier: {"device": 1048576, "file": 4194304}."""
    limit: Limit | None = None
    limit_fraction: float | None = None
    """The measured quantity over `limit.value`, in the unit of the limit."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What only this topic has: losses, tokens per second, the raw times. JSON values."""

    @classmethod
    def of(
        cls,
        seconds: Sequence[float],
        *,
        topic: str,
        case: str,
        arm: str,
        device_name: str,
        versions: dict[str, str],
        commit: str,
        command: str,
        limit: Limit | None = None,
        measured: float | None = None,
        **rest: Any,
    ) -> Self:
        """A row from the times of its repetitions; `rest` are the remaining fields.

        Example:
            >>> where = environment("cpu")
            >>> row = BenchmarkRow.of([0.2, 0.1, 0.3], topic="x", case="a", arm="keep", **where)
            >>> row.median_seconds, row.num_repetitions
            (0.2, 3)

        Args:
            seconds: time of each repetition.
            topic: the benchmark.
            case: what was run; topic, case and arm together are the identity of the row.
            arm: how it was run.
            device_name: from `environment()`, like the next three.
            versions: packages and their versions.
            commit: the source.
            command: how to measure it again.
            limit: what the row is held against.
            measured: the quantity that is held against it, in its unit; the median time if None.
            rest: `moved_bytes`, `peak_bytes`, `extra`.

        Raises:
            ValueError: there is no time, or one that is not a finite number; or the limit is not
                in seconds and `measured` is None.
        """
        if not seconds or not all(math.isfinite(value) for value in seconds):
            raise ValueError(f"seconds must be finite times, at least one; got {list(seconds)!r}")
        lower, upper = seconds[0], seconds[0]
        if len(seconds) > 1:
            lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        median = statistics.median(seconds)
        if limit is not None and measured is None:
            if limit.unit != "s":
                raise ValueError(
                    f"measured must be given in {limit.unit!r}, the unit of {limit.name!r}"
                )
            measured = median
        return cls(
            topic=topic,
            case=case,
            arm=arm,
            device_name=device_name,
            versions=versions,
            commit=commit,
            command=command,
            num_repetitions=len(seconds),
            median_seconds=median,
            quartiles_seconds=(lower, upper),
            limit=limit,
            limit_fraction=None if limit is None or measured is None else measured / limit.value,
            **rest,
        )

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The row that `to_dict` (or a results file) describes.

        Raises:
            ValueError: a field is missing, or one is not known.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != known:
            raise ValueError(
                f"a benchmark row must have exactly the fields {sorted(known)}; "
                f"missing {sorted(known - values.keys())}, unknown {sorted(values.keys() - known)}"
            )
        limit = values["limit"]
        lower, upper = values["quartiles_seconds"]
        changed = {
            "limit": None if limit is None else Limit(**limit),
            "quartiles_seconds": (lower, upper),
        }
        return cls(**{**values, **changed})

    def __str__(self) -> str:
        """One line for the terminal."""
        lower, upper = self.quartiles_seconds
        line = (
            f"{self.topic}: {self.case}: {self.arm}: {self.median_seconds:.4g} s "
            f"({lower:.4g} to {upper:.4g}, {self.num_repetitions} runs)"
        )
        if self.limit is not None and self.limit_fraction is not None:
            line += f", {self.limit_fraction:.3g} of {self.limit.name}"
        return line


def environment(device: str = "cpu") -> Environment:
    """Where this process runs: device, versions, commit, and the command that started it.

    Args:
        device: "cpu", "cuda" or "cuda:1".
    """
    versions = {"python": platform.python_version(), "linux": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Environment(
        device_name=_device_name(device),
        versions=versions,
        commit=_commit(),
        command=_command(sys.argv),
    )


def write_rows(rows: Iterable[BenchmarkRow], directory: str | Path = RESULTS) -> list[Path]:
    """Add rows to `directory/<device>/<topic>.json`; a row of the same case and arm is replaced.

    Returns:
        The files that were written.
    """
    by_file: dict[Path, list[BenchmarkRow]] = {}
    for row in rows:
        path = results_file(row.device_name, row.topic, directory)
        by_file.setdefault(path, []).append(row)
    for path, new_rows in by_file.items():
        old_rows = read_rows(path) if path.exists() else []
        merged = {(row.case, row.arm): row for row in [*old_rows, *new_rows]}
        lines = [json.dumps(row.to_dict(), allow_nan=False) for row in merged.values()]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        unfinished.replace(path)
    return list(by_file)


def results_file(device_name: str, topic: str, directory: str | Path = RESULTS) -> Path:
    """Where the rows of a topic are, for one device."""
    return Path(directory) / _slug(device_name) / f"{topic}.json"


def read_rows(path: str | Path) -> list[BenchmarkRow]:
    """The rows of one results file, in the order in which they were first written.

    Raises:
        ValueError: the file does not hold rows; the message names it.
    """
    try:
        return [BenchmarkRow.from_dict(values) for values in json.loads(Path(path).read_text())]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} does not hold benchmark rows: {error}") from error


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every topic has; a topic adds its own.

    Args:
        description: usually the topic's `__doc__`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be measured, and measure nothing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="rows go to DIR/<device>/<topic>.json (default: benchmarks/results)",
    )
    return parser


def announce(rows: Iterable[tuple[str, str]]) -> None:
    """Print the case and arm of every row that would be measured: what `--dry-run` is for."""
    for case, arm in rows:
        print(json.dumps({"case": case, "arm": arm}))


def run_parts(description: str | None, topic: str, parts: Sequence[str]) -> None:
    """Measure the parts of a topic that the command line names, and write their rows.

    Args:
        description: What the benchmark measures.
        topic: Beginning of the names of files `_TOPIC_PART.py`, each with `announce_rows(options)`,
            pairs of a case and an arm, and `measure_rows(options, where)`, the rows.
        parts: Ends of these names.
    """
    parser = argument_parser(description)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--match", default="", help="cases whose names have this")
    options = parser.parse_args()
    for part in options.part:
        module = importlib.import_module(f"_{topic}_{part}")
        if options.dry_run:
            announce(module.announce_rows(options))
            continue
        for row in module.measure_rows(options, environment(options.device)):
            print(row, file=sys.stderr, flush=True)
            write_rows([row], options.out)


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = _processor_name(cpuinfo.read_text()) or model
    return f"{model.strip()}, {len(os.sched_getaffinity(0))} cores"


def _processor_name(cpuinfo: str) -> str | None:
    """The model name of /proc/cpuinfo, with family and model numbers where the name has no digit.

    Virtual machines name several generations of processors alike ("AMD EPYC").
    """
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE))
    name = fields.get("model name")
    if name is None or re.search(r"\d", name) or not {"cpu family", "model"} <= fields.keys():
        return name
    return f"{name.strip()} (family {fields['cpu family']}, model {fields['model']})"


def _commit() -> str:
    """The commit of the repository; $PENSTOCK_COMMIT where the source came without its .git."""
    if given := os.environ.get("PENSTOCK_COMMIT"):
        return given
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changes else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _command(arguments: Sequence[str]) -> str:
    """`arguments` as they would be typed in the repository root, whatever machine that is on."""
    script = Path(arguments[0]).resolve() if arguments and arguments[0] else None
    if script is not None and script.is_relative_to(REPOSITORY):
        arguments = [str(script.relative_to(REPOSITORY)), *arguments[1:]]
    text = shlex.join(["python3", *arguments]).replace(f"{REPOSITORY}{os.sep}", "")
    text = re.sub(r" --out[ =]('[^']*'|\S+)", "", text)  # where the rows went changes no row
    # A directory of this machine is none of the next one: the option says what to put there.
    return re.sub(r" --([a-z-]+)[ =]('/[^']*'|/\S+)", lambda m: f" --{m[1]} {m[1].upper()}", text)


def _slug(text: str) -> str:
    """`text` as a directory name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
