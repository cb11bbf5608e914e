"""A process under a limit of time, whose descendants end with it, and a log of what it says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from _rows import REPOSITORY

_SECONDS_TO_END = 5.0


class Log:
    """What was said: to the terminal and a file, or, without a file, only kept."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def say(self, line: str) -> None:
        """Add a line."""
        if self._file is None:
            self.text += line + "\n"
            return
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def run_limited(
    command: list[str], variables: dict[str, str], seconds: float, log: Log
) -> int | None:
    """Run a command in the repository root; returns its exit status, None if time ran out."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = process.stdout
    reader = threading.Thread(target=lambda: [log.say(line.rstrip("\n")) for line in lines])
    reader.daemon = True
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
        for number in (signal.SIGTERM, signal.SIGKILL):
            # Some of them start sessions of their own, which no signal to a group reaches.
            for each in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
                if number == signal.SIGTERM and not descendants(process.pid):
                    break
    reader.join(_SECONDS_TO_END)
    if not reader.is_alive():
        lines.close()
    return status


def descendants(parent: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [parent]
    while waiting:
        waiting += (mine := children.get(waiting.pop(), []))
        found += mine
    return found


if __name__ == "__main__":
    sys.exit("benchmarks/device.sh is to be started instead")
