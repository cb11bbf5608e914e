"""Signals at random moments to processes that train a table in a file under `penstock.offload`.

After each of them the rows, the state of Adam and the step count must be those of one and the same
step, bit for bit; a process that was interrupted, not killed, must go on; nothing may be left
beside the table. The test suite runs a few (`test_signals.py`); the long form is::

    python tests/faults/signals_to_tables.py FOLDER --kills 2000 --interrupts 2000 --terms 500
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from penstock import offload  # here, not in a child: an interrupt in an import is another error
from penstock.unified import empty, unify
from penstock.unified.optim import Adam

NUM_ROWS, WIDTH, BATCH = 300, 48, 60
STATES = ("exp_avg", "exp_avg_sq")
PATIENCE_SECONDS = 60.0
AGAIN_SECONDS = 1.0


class Terminated(Exception):
    """The exception of the handler of SIGTERM."""


def gradient_of(step: int) -> torch.Tensor:
    """The same in every process; with duplicates."""
    generator = torch.Generator().manual_seed(step)
    index = torch.randint(0, NUM_ROWS, (BATCH,), generator=generator)
    rows = torch.randn(BATCH, WIDTH, generator=generator)
    shape = (NUM_ROWS, WIDTH)
    return torch.sparse_coo_tensor(index[None], rows, shape, check_invariants=False)


def offloaded(store: Path) -> None:
    """A backward pass whose saved tensors go to a file."""
    x = torch.ones(64, 64, requires_grad=True)
    with offload(store, policy="all", min_bytes=0):
        loss = (x.sin() * x.cos()).sum()
    loss.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.full_like(x, np.cos(2.0)))


def train(path: Path, first: int, ready: int) -> None:
    """Steps until a signal comes; then check that the process can go on."""

    def terminated(*_: object) -> None:
        raise Terminated

    table = unify(path, cache="32KiB", requires_grad=True)
    optimizer = Adam([table], lr=0.1)
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for step in range(first, first + 10**6):
            table.grad = gradient_of(step)
            optimizer.step()
            if step % 4 == 3:
                offloaded(path.parent)
            os.write(ready, b".")
    except (KeyboardInterrupt, Terminated):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    everything = torch.arange(NUM_ROWS)
    plain = table.detach()
    with ThreadPoolExecutor(1) as threads:  # no lock may be held
        rows = threads.submit(lambda: plain[everything]).result(timeout=PATIENCE_SECONDS / 2)
    assert torch.equal(rows, plain[everything])
    offloaded(path.parent)
    if len(optimizer.state[table]) == len(STATES) + 1:
        plain[everything] = rows  # writing goes on


class Trial:
    """A table and its replay in memory."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.path = folder / ("x.npy" if kind == "npy" else "x")
        start = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        if kind == "npy":
            np.save(self.path, start.numpy())
        else:
            empty((NUM_ROWS, WIDTH), path=self.path)[torch.arange(NUM_ROWS)] = start
        self.reference = unify(start, requires_grad=True)
        self.optimizer, self.done = Adam([self.reference], lr=0.1), 0
        self.numbers = random.Random(seed)

    def run(self, number: signal.Signals) -> int:
        """One process and one signal; returns how many steps the process made."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reading)
                train(self.path, self.done, writing)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        before = self.done
        try:
            assert os.read(reading, 1) == b".", "the process ended before its first step"
            time.sleep(self.numbers.uniform(0, 0.03))
            os.kill(child, number)
            self._wait(child, number)
        finally:
            os.close(reading)
        self.check()
        return self.done - before

    def _wait(self, child: int, number: signal.Signals) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        again = time.monotonic() + AGAIN_SECONDS
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"a process hangs after {number.name}")
            if time.monotonic() > again:  # Python drops what is raised in a finaliser
                again += AGAIN_SECONDS
                os.kill(child, number)
            select.select([], [], [], 0.002)
        expected = -signal.SIGKILL if number == signal.SIGKILL else 0
        assert os.waitstatus_to_exitcode(status) == expected, f"{number.name}: {status}"

    def check(self) -> None:
        """Rows, state and count are those of one step, and no other file is there."""
        names = ("", *(f".{name}" for name in STATES), ".step")
        order = names if self.numbers.random() < 0.5 else names[::-1]
        tables = {name: unify(f"{self.path}{name}") for name in order}
        count = int(tables[".step"][0].flatten()[0])
        assert count > self.done, (count, self.done)
        for step in range(self.done, count):
            self.reference.grad = gradient_of(step)
            self.optimizer.step()
        self.done = count
        everything = torch.arange(NUM_ROWS)
        assert torch.equal(tables[""][everything], self.reference.detach().cpu())
        state = self.optimizer.state[self.reference]
        for name in STATES:
            assert torch.equal(tables[f".{name}"][everything], state[name].cpu()), name
        found = sorted(each.name for each in self.path.parent.iterdir())
        assert found == sorted(f"{self.path.name}{name}" for name in names), found


def run(folder: Path, *, kills: int, interrupts: int, terms: int, seed: int = 0) -> dict[str, int]:
    """Send so many signals, in a random order; returns how many steps were made."""
    waiting = [signal.SIGKILL] * kills + [signal.SIGINT] * interrupts + [signal.SIGTERM] * terms
    random.Random(seed).shuffle(waiting)
    steps = {"npy": 0, "native": 0}
    trials = {}
    for kind in steps:
        (folder / kind).mkdir()
        trials[kind] = Trial(folder / kind, kind, seed)
    for at, number in enumerate(waiting):
        kind = ("npy", "native")[at % 2]
        steps[kind] += trials[kind].run(number)
        if at % 100 == 99:
            sys.stdout.write(f"{at + 1} signals, {steps} steps\n")
            sys.stdout.flush()
    return steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for option in ("--kills", "--interrupts", "--terms", "--seed"):
        parser.add_argument(option, type=int, default=0)
    given = parser.parse_args()
    counts = {"kills": given.kills, "interrupts": given.interrupts, "terms": given.terms}
    sys.stdout.write(f"{run(given.folder, **counts, seed=given.seed)}\n")
