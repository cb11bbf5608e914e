"""Planned steps that signals interrupt at random moments: undone or done, never in between.

    PYTHONPATH=src:tests/graph python tests/executor/_signal_fuzz.py --num 2000 --tier file

counts what became of them; `--signal SIGINT` likewise. `--signal SIGKILL` kills processes that
train, of which nothing may be left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch

from _planned import CASES, bound, everything, plan_of, trainee
from _steps import eager_step
from penstock.errors import TornStepError

CASE, OPTIMIZER, SHARE = "mixture", "adamw", 1 / 3
_STATES = 40  # steps from one start


class Stopped(BaseException):
    """Raised by the handler of a signal."""


def _stop(*_: object) -> None:
    raise Stopped


def digest(model: Any, stepper: Any) -> str:
    """All that training changes, as a number."""
    found = everything(model, stepper, [])
    tensors = [*found["model"].values(), found["random"]]
    tensors += [each for state in found["optimizer"].values() for each in state.values()]
    raw = b"".join(each.contiguous().numpy().tobytes() for each in tensors)
    return hashlib.sha256(raw).hexdigest()


def eager_states() -> list[str]:
    """Digests after each number of ordinary steps."""
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    torch.manual_seed(1)
    states = []
    for _ in range(_STATES + 1):
        eager_step(model, stepper, CASES[CASE])
        states.append(digest(model, stepper))
    return states


def fuzz(number: int, count: int, tier: str, store: Path, *, seed: int = 0) -> Counter[str]:
    """Interrupt `count` steps; returns how many were undone, done, torn, wrong or not hit."""
    states, moments = eager_states(), random.Random(seed)
    outcomes: Counter[str] = Counter()
    main = threading.main_thread().ident
    assert main is not None
    previous = signal.signal(number, _stop)
    try:
        while outcomes.total() < count:
            model, stepper = trainee(CASES[CASE], OPTIMIZER)
            arguments = {"share": SHARE, "tier": tier, "store": store}
            step = bound(CASE, OPTIMIZER, model, stepper, **arguments)
            torch.manual_seed(1)
            for _ in range(2):  # the second one captures again
                step(CASES[CASE].batch)
            begin = time.perf_counter()
            step(CASES[CASE].batch)
            seconds, done = time.perf_counter() - begin, 2
            while outcomes.total() < count and done < _STATES:
                delay = moments.uniform(0, 0.5 * seconds)
                timer = threading.Timer(delay, signal.pthread_kill, (main, number))
                outcome, last, returned = "not hit", digest(model, stepper), False
                try:
                    timer.start()
                    begin = time.perf_counter()
                    try:
                        step(CASES[CASE].batch)
                        returned = True
                        seconds = min(seconds, time.perf_counter() - begin)  # others took the rest
                    finally:
                        timer.join()
                except Stopped:
                    outcome = "after it" if returned else "hit"
                except TornStepError:
                    outcomes["torn"] += 1
                    break
                now = digest(model, stepper)
                if now == states[done + 1]:
                    done += 1
                    outcomes["done" if outcome == "hit" else outcome] += 1
                elif now == last:
                    outcomes["undone"] += 1
                else:
                    outcomes["wrong"] += 1
                    break
            step.close()
    finally:
        signal.signal(number, previous)
    return outcomes


def kill(count: int, tier: str, store: Path, *, seed: int = 0) -> Counter[str]:
    """Kill `count` processes that train; returns how many died, and how often files were left."""
    moments, outcomes = random.Random(seed), Counter[str]()
    plan_of(CASE, OPTIMIZER, SHARE, tier)  # here once, not in each of them
    for _ in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _train_for_ever(tier, store, writer)
        os.close(writer)
        assert os.read(reader, 1), "it died before its first step had ended"
        time.sleep(moments.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes["killed" if status == -signal.SIGKILL else "wrong"] += 1
        outcomes["files left"] += any(store.iterdir())
    return outcomes


def _train_for_ever(tier: str, store: Path, writer: int) -> NoReturn:
    try:
        model, stepper = trainee(CASES[CASE], OPTIMIZER)
        # In torch 2.11 the fork of a process that has captured cannot differentiate.
        shadow = 0 if torch.__version__ < "2.12" else None
        options = {"share": SHARE, "tier": tier, "store": store, "shadow": shadow}
        step = bound(CASE, OPTIMIZER, model, stepper, **options)
        step(CASES[CASE].batch)
        os.write(writer, b".")
        while True:
            step(CASES[CASE].batch)
    finally:
        os._exit(1)


def main() -> None:
    """Count the outcomes of many interrupted steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--tier", choices=["host", "file"], default="file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/tmp") as store:
        number = getattr(signal, options.signal)
        if number == signal.SIGKILL:
            outcomes = kill(options.num, options.tier, Path(store), seed=options.seed)
        else:
            outcomes = fuzz(number, options.num, options.tier, Path(store), seed=options.seed)
        left = len(list(Path(store).iterdir()))
    sys.stdout.write(f"{options.signal} {options.tier} {dict(outcomes)}; files left: {left}\n")
    sys.exit(bool(outcomes["torn"] + outcomes["wrong"] + outcomes["files left"] + left))


if __name__ == "__main__":
    main()
