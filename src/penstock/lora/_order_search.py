"""Search for an order of pieces: hill climbing over the keys by which pieces are placed.

A piece may be placed once all pieces of its job's step before have been. Of these the one with the
least key is next, and goes into the first micro-batch with room from its job's release on. At first
the key of piece i of step t of job j is

    -(tail(j, t) + size(i) / cap)

so the longest chain of steps comes first, and of its pieces the largest. A try changes the keys of
a few pieces, and is kept if the schedule does not become longer and, at the same length, its last
micro-batch does not become fuller. Tries are counted and their random numbers are seeded, so the
result is the same on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

from penstock.batching.packing import FirstFit
from penstock.lora._schedule import JobBatches

_PLACEMENTS = 100_000  # over all tries: half a second of Python
# Pieces of a try, and the standard deviation of the change of their keys, in micro-batches.
_MOST_CHANGES, _SPREAD = 3, 2.0

Positions = list[list[list[int]]]
"""The micro-batch of each piece, by job and step."""
Step = tuple[int, int]
"""Number of the job, and of the step within it."""

_Keys = list[list[list[float]]]


def search_orders(
    jobs: Sequence[JobBatches], cap: int, depth: int, tails: Mapping[Step, int], bound: int
) -> Positions:
    """Return the micro-batches of all pieces in the best order that was found.

    Args:
        jobs: The jobs.
        cap: The most that the pieces of a micro-batch add up to.
        depth: Micro-batches from a step's last piece to the first of the next one, at least.
        tails: The least micro-batches from the beginning of each step to the end of its job.
        bound: Micro-batches at which the search ends.
    """
    chance = random.Random(0)
    keys: _Keys = [
        [[-(tails[number, step] + size / cap) for size in sizes] for step, sizes in enumerate(each)]
        for number, each in enumerate(job.batches for job in jobs)
    ]
    places = [
        (number, step, piece)
        for number, job in enumerate(jobs)
        for step, sizes in enumerate(job.batches)
        for piece in range(len(sizes))
    ]
    best = _place(jobs, cap, depth, keys)
    score = _score(jobs, best)
    for _ in range(_PLACEMENTS // len(places)):
        if score[0] <= bound:
            break
        changed = chance.sample(places, min(chance.randint(1, _MOST_CHANGES), len(places)))
        before = [keys[j][t][i] for j, t, i in changed]
        for j, t, i in changed:
            keys[j][t][i] += chance.gauss(0.0, _SPREAD)
        tried = _place(jobs, cap, depth, keys)
        if (new := _score(jobs, tried)) <= score:
            best, score = tried, new
            continue
        for (j, t, i), key in zip(changed, before, strict=True):
            keys[j][t][i] = key
    return best


def _place(jobs: Sequence[JobBatches], cap: int, depth: int, keys: _Keys) -> Positions:
    """Place all pieces in the order of their keys."""
    row = FirstFit(cap, 64)
    positions: Positions = [[] for _ in jobs]
    release = [0] * len(jobs)
    left = [0] * len(jobs)  # pieces of the job's step that are not placed yet
    heap: list[tuple[float, int, int]] = []

    def begin(number: int, step: int) -> None:
        sizes = jobs[number].batches[step]
        positions[number].append([0] * len(sizes))
        left[number] = len(sizes)
        for piece, key in enumerate(keys[number][step]):
            heapq.heappush(heap, (key, number, piece))

    for number in range(len(jobs)):
        begin(number, 0)
    while heap:
        _, number, piece = heapq.heappop(heap)
        step = len(positions[number]) - 1
        size = jobs[number].batches[step][piece]
        positions[number][step][piece] = row.place(size, release[number])
        left[number] -= 1
        if left[number] == 0 and step + 1 < jobs[number].num_steps:
            release[number] = max(positions[number][step]) + depth
            begin(number, step + 1)
    return positions


def _score(jobs: Sequence[JobBatches], positions: Positions) -> tuple[int, int]:
    """Return the number of micro-batches, and the load of the last one."""
    last = max(max(each) for job in positions for each in job)
    # Only pieces of a job's last step can be there.
    load = sum(
        size
        for job, of_job in zip(jobs, positions, strict=True)
        for sizes, of_step in zip(job.batches[-1:], of_job[-1:], strict=True)
        for size, position in zip(sizes, of_step, strict=True)
        if position == last
    )
    return last + 1, load
