"""A short form of `fuzz_signals.py`, and a signal at every place where Python looks for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fuzz_signals
import penstock
from fork_servers import WHOLE_END, find_python
from fuzz_signals import Came

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
STRIDE = 1201  # bytecodes; 159 has been tried too
NUM_LAYERS = 4  # the work is their square
OURS = str(Path(penstock.__file__).parent)


@pytest.mark.parametrize(
    ("what", "num_signals"), [("interrupts", 40), ("SIGKILL", 10), ("SIGINT", 10), ("SIGTERM", 10)]
)
def test_signals_at_random_moments(what, num_signals):
    """In a process of its own, which has no threads when it forks."""
    program = [find_python("torch"), fuzz_signals.__file__, what, str(num_signals), "--seed", "7"]
    environment = os.environ | WHOLE_END
    found = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 problems" in found.stdout


@pytest.mark.parametrize("options", fuzz_signals.OPTIONS[1:3], ids=str)
def test_a_signal_at_any_bytecode_of_ours(store, options):
    """Raised by a trace of Penstock's own functions, so at about the same places in every run.

    While they are watched: else Python looks for signals at some bytecodes only, which are those of
    the other tests, and between these a lock may be held that nothing would release.
    """

    def come(number: int, frame: object) -> None:
        raise Came

    def count(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                if signal.getsignal(signal.SIGUSR1) is come:
                    left = 1
                else:
                    signal.raise_signal(signal.SIGUSR1)
        return count

    expected, stride = fuzz_signals.gradient(NUM_LAYERS), STRIDE
    before = signal.signal(signal.SIGUSR1, come)
    offload = penstock.offload(store, **options)
    num_came, place, reached = 0, 1, True
    try:
        while reached:
            left = place
            traced = sys.gettrace()
            try:
                sys.settrace(count)
                with offload:
                    fuzz_signals.gradient(NUM_LAYERS)
            except Came:
                num_came += 1
            finally:
                sys.settrace(traced)
            reached = left <= 0  # not where the block ended first
            place += stride
            with offload:
                assert torch.equal(fuzz_signals.gradient(NUM_LAYERS), expected)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert num_came > 5
    assert not fuzz_signals._left(offload, options)
    offload.close()
