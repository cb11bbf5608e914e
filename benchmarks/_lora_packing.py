"""Time of a schedule for the data of many jobs, and its micro-batches over the lower bound."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import penstock
from _rows import BenchmarkRow, Limit

CAP = 2048  # tokens of a micro-batch
NUM_JOBS, BATCH_SIZE = 8, 32
BAR_SECONDS, SAMPLES_OF_BAR = 5.0, 100_000
ARMS = {"first fit": 0.0, "penstock": 5.0}
"""Seconds of HiGHS by arm: none, and what is usual."""


def draw_jobs(num_samples: int) -> list[list[list[int]]]:
    """Return by job and step the lengths of samples, lognormal with the mean of each job."""
    generator = np.random.default_rng(0)
    jobs = []
    for job in range(NUM_JOBS):
        lengths = generator.lognormal(4 + 0.25 * job, 0.6, num_samples // NUM_JOBS)
        lengths = np.clip(lengths.astype(int), 1, CAP).tolist()
        starts = range(0, len(lengths), BATCH_SIZE)
        jobs.append([lengths[start : start + BATCH_SIZE] for start in starts])
    return jobs


def packing_rows(where: Any, *, num_samples: int, repetitions: int = 3) -> list[BenchmarkRow]:
    """Return a row an arm."""
    jobs = [
        penstock.lora.JobBatches(f"job{number}", batches)
        for number, batches in enumerate(draw_jobs(num_samples))
    ]
    rows = []
    for arm, time_limit in ARMS.items():
        seconds, schedules = [], []
        for _ in range(repetitions):
            start = time.perf_counter()
            schedules.append(penstock.lora.pack(jobs, CAP, time_limit=time_limit))
            seconds.append(time.perf_counter() - start)
        schedule = schedules[-1]
        has_bar = num_samples == SAMPLES_OF_BAR and arm == "penstock"
        num_batches = len(schedule.micro_batches)
        rows.append(
            BenchmarkRow.of(
                seconds,
                topic="lora",
                case=f"packing: {num_samples} samples of {NUM_JOBS} jobs, {BATCH_SIZE} a step",
                arm=arm,
                limit=Limit(name="5 s", value=BAR_SECONDS, unit="s") if has_bar else None,
                extra={
                    "part": "packing",
                    "num_samples": num_samples,
                    "num_micro_batches": num_batches,
                    "lower_bound": schedule.lower_bound,
                    "over_bound": num_batches / schedule.lower_bound,
                },
                **where,
            )
        )
    return rows
