"""Measures what needs a GPU, in order of worth, within a number of minutes; `device.sh` starts it.

    benchmarks/device.sh OUT_DIR                     # 9 minutes
    benchmarks/device.sh OUT_DIR --after EARLIER     # what the call that wrote EARLIER left
    benchmarks/device.sh OUT_DIR smoke tests         # only these topics
    benchmarks/device.sh OUT_DIR --dry-run           # start every topic, measure nothing

First comes `python -m penstock.env`, then what is missing, by name; then the steps of the topics,
each with its own limit of time. A call writes at most 8 files: <device>/<topic>.json (the rows,
written after every measurement), device.json (what was done, for the next call) and device.log (all
output). The exit status is 1 if a step failed, was cut off, or misses a package or data.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _device_run import Log, run_limited
from _device_steps import NEEDED, STEPS, TOPICS, Step
from _rows import REPOSITORY, _commit

STATE, LOG = "device.json", "device.log"
MOST_FILES = 8
RESERVE_SECONDS = 10.0  # of a call, for its summary
START_SECONDS = 120.0  # that a topic may take to say what it would measure
PLATFORMS = tuple(f"manylinux_{glibc}_x86_64" for glibc in ("2_28", "2_27", "2_24", "2_17"))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/device.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT_DIR")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=" ".join(TOPICS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: 9)")
    parser.add_argument("--after", type=Path, help="OUT_DIR of an earlier call: do what it left")
    parser.add_argument("--dry-run", action="store_true", help="start every topic, measure nothing")
    parser.add_argument("--device", default="cuda", help="cpu tries the suite without a GPU")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=os.environ.get("PENSTOCK_WHEELS"),
        help="folder of wheels to use besides what is installed (or $PENSTOCK_WHEELS)",
    )
    parser.add_argument("--fetch-wheels", type=Path, metavar="DIR", help="download them to DIR")
    parser.add_argument("--python-version", default="3.12", help="that wheels are fetched for")
    parser.add_argument("--from", dest="directory", type=Path, default=Path.cwd())
    options = parser.parse_intermixed_args(given)  # topics may follow options
    if options.out is None and options.fetch_wheels is None:
        parser.error("OUT_DIR is missing")
    unknown = sorted(set(options.topics) - set(TOPICS))
    if unknown:
        parser.error(f"there is no topic {', '.join(unknown)}; there are {', '.join(TOPICS)}")
    for name in ("out", "after", "wheels", "fetch_wheels"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, options.directory / path)
    return options


def fetch_wheels(directory: Path, python_version: str) -> int:
    """Download the wheels that a GPU machine usually lacks, at the tested versions."""
    constraints = (REPOSITORY / "constraints.txt").read_text()
    wanted = [re.search(rf"^{name}==\S+$", constraints, re.MULTILINE) for name in NEEDED]
    command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"), "--only-binary"]
    command += [":all:", "--implementation", "cp", "--python-version", python_version]
    command += [text for platform in PLATFORMS for text in ("--platform", platform)]
    names = [
        name if found is None else found[0] for name, found in zip(NEEDED, wanted, strict=True)
    ]
    return subprocess.run([*command, "--dest", str(directory), *names], check=False).returncode


def install_wheels(directory: Path, target: str) -> None:
    """Unpack wheels where `environment_of` finds them; nothing is installed for good."""
    wheels = sorted(map(str, directory.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"--wheels {directory} has no wheel; fetch some with --fetch-wheels")
    command = [*(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")]
    command += ["--no-compile", "--no-cache-dir", "--target", target, *wheels]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"the wheels of {directory} cannot be installed; see above")


def environment_of(target: str, cache: str) -> dict[str, str]:
    """The environment of all steps: our sources, the wheels, no network."""
    paths = [str(REPOSITORY / "src"), target, os.environ.get("PYTHONPATH", "")]
    return {
        "PENSTOCK_CACHE_DIR": cache,
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


def missing(step: Step, target: str) -> list[str]:
    """The packages and data that a step needs and that are not there, by name."""
    sys.path.insert(0, target)
    try:
        found = [name for name in step.packages if importlib.util.find_spec(name) is None]
    finally:
        sys.path.remove(target)
    data = Path(os.environ.get("PENSTOCK_DATA", "/nonexistent"))
    return found + [f"$PENSTOCK_DATA/{name}" for name in step.data if not (data / name).exists()]


def load_state(directory: Path | None) -> dict[str, Any]:
    path = None if directory is None else directory / STATE
    return json.loads(path.read_text())["steps"] if path is not None and path.exists() else {}


def is_done(record: dict[str, Any] | None, commit: str) -> bool:
    """Whether a step need not run again: it was ok, or failed with the very same source."""
    if record is None:
        return False
    return record["status"] == "ok" or (
        record["status"].startswith("FAILED") and record["commit"] == commit
    )


def measure(options: argparse.Namespace, steps: list[Step], target: str, log: Log) -> int:
    """Run steps until the time is over; what there is no time for is left to the next call."""
    end = time.monotonic() + 60 * options.minutes - RESERVE_SECONDS
    commit = _commit()
    state = {**load_state(options.after), **load_state(options.out)}
    variables = environment_of(target, tempfile.mkdtemp(prefix="penstock-cache-"))
    for step in steps:
        if is_done(state.get(step.key), commit):
            log.say(f"== {step.key}: {state[step.key]['status']} in an earlier call")
            continue
        record: dict[str, Any] = {"seconds": 0.0, "commit": commit}
        state[step.key] = record
        left = end - time.monotonic()
        if absent := missing(step, target):
            record["status"] = f"MISSING {', '.join(absent)}"
        elif left < step.least_seconds:
            record["status"] = "left to the next call"
        else:
            log.say(f"\n== {step.key}, at most {min(step.seconds, left):.0f} s")
            command = [sys.executable, *step.command(options.device, options.out)]
            begin = time.monotonic()
            status = run_limited(command, variables, min(step.seconds, left), log)
            record["seconds"] = round(time.monotonic() - begin, 1)
            record["status"] = {0: "ok", None: "CUT OFF by its limit"}.get(
                status, f"FAILED (exit status {status})"
            )
        (options.out / STATE).write_text(json.dumps({"steps": state}, indent=1) + "\n")
    log.say("\n== summary")
    for step in steps:
        record = state[step.key]
        log.say(f"{step.key:28s} {record['seconds']:7.1f} s  {record['status']}")
    files = sum(path.is_file() for path in options.out.rglob("*"))
    if files > MOST_FILES:
        log.say(f"{options.out} has {files} files, more than {MOST_FILES}: some may stay behind")
    statuses = [state[step.key]["status"] for step in steps]
    return 1 if any(status.startswith(("FAILED", "MISSING", "CUT")) for status in statuses) else 0


def dry_run(options: argparse.Namespace, steps: list[Step], target: str, log: Log) -> int:
    """Start every step without measuring; say in one table what each would measure."""
    variables = environment_of(target, tempfile.mkdtemp(prefix="penstock-cache-"))
    lines, failed = [], 0
    for step in steps:
        command = [sys.executable, *step.dry_command(options.device, options.out)]
        begin = time.monotonic()
        said = Log(None)
        status = run_limited(command, variables, START_SECONDS, said)
        seconds = time.monotonic() - begin
        absent = missing(step, target)
        number = step.num_measurements(said.text)
        started = status == 0 and number > 0
        if not started:
            failed += 1
            log.say(f"== {step.key} did not start (exit status {status}):\n{said.text[-3000:]}")
        what = f"{number} {step.unit}" if started else "DOES NOT START"
        if absent:
            failed += 1
            what += f"; MISSING {', '.join(absent)}"
        lines.append(f"{step.key:28s} {step.seconds:6d} s  {seconds:8.1f} s  {what}")
    log.say(f"\n{'step':28s} {'at most':>8s}  {'started in':>10s}  would measure")
    for line in lines:
        log.say(line)
    calls = calls_of(steps, 60 * options.minutes - RESERVE_SECONDS)
    total = sum(step.seconds for step in steps) + RESERVE_SECONDS * len(calls)
    log.say(
        f"\n{len(calls)} calls of {options.minutes:g} minutes, {total / 60:.1f} in all at most:"
    )
    for number, call in enumerate(calls, 1):
        log.say(f"  {number}: {', '.join(step.key for step in call)}")
    return 1 if failed else 0


def calls_of(steps: Sequence[Step], seconds: float) -> list[list[Step]]:
    """The steps of every call, if each took as long as it may."""
    calls: list[list[Step]] = []
    rest = list(steps)
    while rest:
        left, call = seconds, []
        for step in rest:
            if step.seconds <= left:
                call.append(step)
                left -= step.seconds
        if not call:
            raise SystemExit(f"{rest[0].key} alone takes longer than a call: raise --minutes")
        calls.append(call)
        rest = [step for step in rest if step not in call]
    return calls


def main() -> int:
    options = arguments()
    if options.fetch_wheels is not None:
        return fetch_wheels(options.fetch_wheels, options.python_version)
    os.chdir(REPOSITORY)
    options.out.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not options.topics or step.topic in options.topics]
    with tempfile.TemporaryDirectory() as target, Log(options.out / LOG) as log:
        if options.wheels is not None:
            install_wheels(options.wheels, target)
        variables = environment_of(target, target)
        run_limited([sys.executable, "-m", "penstock.env"], variables, START_SECONDS, log)
        for step in steps:
            if absent := missing(step, target):
                log.say(f"missing for {step.key}: {', '.join(absent)}")
        if options.dry_run:
            return dry_run(options, steps, target, log)
        asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        command = [sys.executable, "-c", asked]
        if options.device != "cpu" and run_limited(command, variables, START_SECONDS, log) != 0:
            log.say("No CUDA device, or no torch that can use it; --dry-run works without one.")
            return 1
        return measure(options, steps, target, log)


if __name__ == "__main__":
    sys.exit(main())
