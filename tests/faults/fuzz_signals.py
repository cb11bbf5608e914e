"""Signals at random moments of steps under `penstock.offload`: no wrong number, no hang, no file.

    python tests/faults/fuzz_signals.py interrupts 10000   # handlers raise, the process goes on
    python tests/faults/fuzz_signals.py SIGKILL 2000       # a process each
    python tests/faults/fuzz_signals.py SIGINT 2000        # default handler
    python tests/faults/fuzz_signals.py SIGTERM 500        # a handler that raises SystemExit

`test_fuzz_signals.py` runs a few of each.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import torch

import penstock
from penstock.activations import _offload
from penstock.memory import Tier

SECONDS_TO_END = 60
OPTIONS = [
    {"policy": "all", "min_bytes": 0},
    {"policy": "all", "min_bytes": 0, "device_memory": "150KiB"},
    {"policy": "auto", "min_bytes": 0},
    {"policy": "auto", "min_bytes": 0, "device_memory": "150KiB"},
    {"policy": "auto", "device_memory": "150KiB"},
]


class Came(BaseException):
    """Exception of a handler."""


def gradient(num_layers: int = 10) -> torch.Tensor:
    x = torch.linspace(-1, 1, 96 * 96).view(96, 96).requires_grad_()
    y = x
    for _ in range(num_layers):
        y = (y @ y).tanh() * 1.01
    return torch.autograd.grad(y.sum(), x)[0]


def interrupts(num_signals: int, store: str, seed: int) -> list[str]:
    """Interrupt steps by signals whose handlers raise; returns what went wrong."""

    def come(number: int, frame: object) -> NoReturn:
        raise Came(number)

    numbers = random.Random(seed)
    expected = gradient()
    problems: list[str] = []
    signals = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, come) for each in signals}
    timers = {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGVTALRM: signal.ITIMER_VIRTUAL}
    num_came = 0
    faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True)
    for options in OPTIONS:
        offload = penstock.offload(store, **options)  # type: ignore[arg-type]
        until = num_came + -(-num_signals // len(OPTIONS))
        while num_came < until:
            faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True)
            kind = numbers.choice((*timers, signal.SIGINT, signal.SIGTERM))
            try:
                if kind in timers:
                    signal.setitimer(timers[kind], numbers.uniform(1e-5, 0.015))
                    while True:
                        with offload:
                            gradient()
                else:
                    os.kill(_helper(kind, numbers.uniform(0, 0.01)), 0)
                    while True:
                        with offload:
                            gradient()
            except Came:
                num_came += 1
            with offload:
                found = gradient()
            if not torch.equal(found, expected):
                problems.append(f"wrong gradient after {num_came} signals of {options}")
        gc.collect()
        problems += _left(offload, options)
        offload.close()
    faulthandler.cancel_dump_traceback_later()
    for each, handler in before.items():
        signal.signal(each, handler)
    return problems


def _helper(number: int, seconds: float) -> int:
    """Have this process signalled from outside, after a while."""
    import threading

    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
    return os.getpid()


def _left(offload: penstock.activations.Offload, options: object) -> list[str]:
    deadline = time.monotonic() + 10
    while True:
        offload.report()
        engine, file = offload._engine, offload._file
        assert file is not None
        left = {
            "entered": offload._num_entered,
            "records": len(engine._records),
            "backlog": engine._writes.backlog_bytes,
            "file": file.used_bytes,
            **{tier.value: offload.ledger.resident(tier) for tier in Tier},
        }
        if not any(left.values()):
            return []
        if time.monotonic() > deadline:
            return [f"left behind with {options}: {left}"]
        time.sleep(0.01)


def deaths(name: str, num_signals: int, store: str, seed: int) -> list[str]:
    """Let processes die of a signal; returns what went wrong. This process never computes."""
    # A Ctrl-C inside an import can be lost in a callback of Python's own.
    penstock.offload(store).close()
    numbers, problems = random.Random(seed), []
    number = getattr(signal, name)
    for index in range(num_signals):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _train_for_ever(store, writer, index)
        os.close(writer)
        assert os.read(reader, 1) == b"r"
        time.sleep(numbers.uniform(0, 0.05))
        os.kill(child, number)
        status = _ended(child)
        said = b""
        while part := os.read(reader, 4096):
            said += part
        os.close(reader)
        expected = {"SIGTERM": 7, "SIGINT": 8}.get(name, -number)
        if status != expected:
            problems.append(f"{name} {index}: ended with {status}, not {expected}")
        if said:
            problems.append(f"{name} {index}: {said.decode()}")
        if left := os.listdir(store):
            problems.append(f"{name} {index}: files left: {left}")
    return problems


def _ended(child: int) -> int | str:
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "a hang"


def _train_for_ever(store: str, writer: int, seed: int) -> NoReturn:
    """Trains until a signal ends it, and says what is wrong."""
    faulthandler.dump_traceback_later(SECONDS_TO_END - 10, exit=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        torch.set_num_threads(1)
        expected = gradient()
        os.write(writer, b"r")
        while True:
            with penstock.offload(store, **OPTIONS[seed % len(OPTIONS)]) as offload:  # type: ignore[arg-type]
                for _ in range(3):
                    if not torch.equal(gradient(), expected):
                        os.write(writer, b"a wrong gradient ")
            offload.close()
    except KeyboardInterrupt:
        sys.exit(8)
    except Exception as error:
        os.write(writer, repr(error).encode())
        sys.exit(1)
    finally:
        _offload._close_all()  # what the interpreter's end calls of Penstock's
        os._exit(_code_of(sys.exc_info()[1]))


def _code_of(error: BaseException | None) -> int:
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("num_signals", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path("/var/tmp")) as store:
        begin = time.monotonic()
        given = (arguments.num_signals, store, arguments.seed)
        problems = (
            interrupts(*given) if arguments.what == "interrupts" else deaths(arguments.what, *given)
        )
        seconds = time.monotonic() - begin
    for problem in problems:
        sys.stdout.write(problem + "\n")
    sys.stdout.write(
        f"{arguments.num_signals} {arguments.what} in {seconds:.0f} s: {len(problems)} problems\n"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
