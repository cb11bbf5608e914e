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
import math
import random
from collections.abc import Mapping, Sequence
from itertools import chain

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
    runs = [_order_job(number, job, keys[number]) for number, job in enumerate(jobs)]
    order = sorted(chain.from_iterable(runs))
    score = _score(order, len(jobs), cap, depth)
    scores = {_name_order(order): score}
    for _ in range(_PLACEMENTS // len(places)):
        if score[0] <= bound:
            break
        changed = chance.sample(places, min(chance.randint(1, _MOST_CHANGES), len(places)))
        before = [keys[j][t][i] for j, t, i in changed]
        for j, t, i in changed:
            keys[j][t][i] += chance.gauss(0.0, _SPREAD)
        tried = list(runs)
        for j in {j for j, _, _ in changed}:
            tried[j] = _order_job(j, jobs[j], keys[j])
        order = sorted(chain.from_iterable(tried))
        name = _name_order(order)
        if (new := scores.get(name)) is None:
            new = scores[name] = _score(order, len(jobs), cap, depth)
        if new <= score:
            runs, score = tried, new
            continue
        for (j, t, i), key in zip(changed, before, strict=True):
            keys[j][t][i] = key
    return _place(jobs, cap, depth, keys)


# Of a job, the key by which it is placed among other jobs' pieces, the number of the job, the
# number in the job's own order, the size, and whether it is the last one of its step.
_Placed = tuple[float, int, int, int, bool]


def _order_job(number: int, job: JobBatches, keys: list[list[float]]) -> list[_Placed]:
    """Return a job's pieces in the order of their keys, step by step.

    A piece behind one with a larger key is next as soon as that one was placed: among the pieces of
    other jobs its place is that of the largest key so far.
    """
    run: list[_Placed] = []
    largest = -math.inf
    for sizes, of_step in zip(job.batches, keys, strict=True):
        left = len(sizes)
        for key, _, size in sorted(zip(of_step, range(left), sizes, strict=True)):
            largest = max(largest, key)
            left -= 1
            run.append((largest, number, len(run), size, left == 0))
    return run


def _name_order(order: list[_Placed]) -> tuple[tuple[int, int], ...]:
    """Return what decides the micro-batches of an order: jobs and sizes, one after the other."""
    return tuple([(number, size) for _, number, _, size, _ in order])


def _score(order: list[_Placed], num_jobs: int, cap: int, depth: int) -> tuple[int, int]:
    """Return the number of micro-batches of an order, and the load of the last one."""
    room, last = [cap], 0  # behind the last micro-batch with pieces there is always an empty one
    release, ends = [0] * num_jobs, [0] * num_jobs
    for _, number, _, size, is_last in order:
        position = release[number]
        while room[position] < size:
            position += 1
        room[position] -= size
        if position > last:
            last = position
        if position + 1 == len(room):
            room.append(cap)
        if position > ends[number]:
            ends[number] = position
        if is_last:
            release[number] = ends[number] + depth
            if release[number] >= len(room):
                room += [cap] * (release[number] + 1 - len(room))
    return last + 1, cap - room[last]


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
