"""Several fine-tuning jobs in one process, of stock PEFT or of `penstock.lora.Jobs`.

`lora.py` starts it, once for the arms in one process and once a job for the arm of a process each.
It says when it is warm, waits for a line, trains, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import penstock
from _lora_layers import peak_of
from _lora_models import (
    add_flags,
    base_bytes,
    live_base_bytes,
    lora_config,
    model_of,
    with_adapter,
)
from _train import memory_bytes

TOGETHER = "penstock, jobs together"
ONE_BY_ONE = "PEFT, one after the other"
FUSED_ONE_BY_ONE = "penstock, one after the other"
PROCESSES = "PEFT, one process each"
ARMS = (ONE_BY_ONE, PROCESSES, FUSED_ONE_BY_ONE, TOGETHER)
LEARNING_RATE = 1e-4
RANK = 16


def samples_of(options: argparse.Namespace, job: int, num_steps: int) -> list[Any]:
    """Return the samples of a job, one a step."""
    model = model_of(options)
    return [
        model.batch(rows=1, length=options.rows, device=options.device, seed=100 * job + step)
        for step in range(num_steps)
    ]


class OneByOne:
    """Jobs one after the other, each with PEFT's model of the one base.

    Args:
        base: The base; it is as before afterwards.
        options: The command line.
    """

    def __init__(self, base: Any, options: argparse.Namespace) -> None:
        self._base, self._options = base, options
        self.losses: list[list[float]] = []
        self.growth_bytes = 0

    def train(self, job: int) -> float:
        """Train a job and return the seconds of its steps, the first left out."""
        options = self._options
        peft = with_adapter(
            self._base,
            rank=RANK,
            dropout=options.dropout,
            fused=options.arm == FUSED_ONE_BY_ONE,
        )
        optimizer = torch.optim.AdamW(
            [each for each in peft.parameters() if each.requires_grad], lr=LEARNING_RATE
        )
        samples = samples_of(options, job, options.steps + 2)
        losses: list[float] = []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = peft(**samples[len(losses)]).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        step()
        start = time.perf_counter()
        for _ in range(options.steps):
            step()
        seconds = time.perf_counter() - start
        optimizer.zero_grad(set_to_none=True)
        self.growth_bytes = max(self.growth_bytes, peak_of(step, options.device))
        self.losses.append(losses)
        self._base = peft.unload()
        return seconds

    def run(self, first: int, num_jobs: int) -> float:
        """Return the seconds of a step of each job, added up."""
        jobs = range(first, first + num_jobs)
        return sum(self.train(job) for job in jobs) / self._options.steps


class Together:
    """Jobs in one `penstock.lora.Jobs`; a micro-batch holds a sample of each.

    Args:
        base: The base.
        options: The command line.
    """

    def __init__(self, base: Any, options: argparse.Namespace) -> None:
        self._steps, self._device = options.steps, options.device
        most = options.rows * options.jobs
        self._jobs: Any = penstock.lora.Jobs(base, max_tokens=most, chunk_tokens=options.rows)
        for job in range(options.jobs):
            samples = samples_of(options, job, options.steps + 2)
            self._jobs.add(
                f"job{job}",
                [sample["input_ids"][0].cpu() for sample in samples],
                lora_config(rank=RANK, dropout=options.dropout),
                optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
                num_steps=options.steps + 2,
                seed=job,
            )
        self.growth_bytes = 0

    def run(self) -> float:
        """Return the seconds of a step of all jobs."""
        self._jobs.step()
        start = time.perf_counter()
        for _ in range(self._steps):
            self._jobs.step()
        seconds = time.perf_counter() - start
        self.growth_bytes = peak_of(self._jobs.step, self._device)
        return seconds / self._steps

    @property
    def losses(self) -> list[list[float]]:
        """Losses by job."""
        return [list(each.losses) for each in self._jobs.report().jobs]

    def facts(self) -> dict[str, Any]:
        """Return how many rows micro-batches had, and whether neighbours change no bit."""
        told = self._jobs.report().to_dict()
        names = ("is_exact", "inexact_reason", "num_micro_batches", "num_filler_rows")
        return {name: told[name] for name in names}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options that `lora.py` chooses for one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="tokens of a sample, one a step")
    parser.add_argument("--dropout", type=float, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    add_flags(parser)
    return parser.parse_args(given)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return what one process measures."""
    torch.set_num_threads(options.threads)
    base = model_of(options).build(options.device)
    own_bytes = live_base_bytes(base)
    facts: dict[str, Any] = {}
    if options.arm == TOGETHER:
        training: Any = Together(base, options)
        wait()
        seconds = training.run()
        facts = training.facts()
    else:
        training = OneByOne(base, options)
        wait()
        seconds = training.run(options.first, options.jobs)
    return {
        "seconds": [seconds],
        "growth_bytes": training.growth_bytes,
        "process_peak_bytes": memory_bytes("VmHWM"),
        "base_bytes": base_bytes(base),
        "num_bases": live_base_bytes(base) / own_bytes,
        "losses": training.losses,
        "facts": facts,
    }


def wait() -> None:
    """Say that the process is ready, and wait until it may go on."""
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    print(json.dumps(run(arguments())))
