"""Packing of jobs: steps in waves, the pieces of a wave by first fit, and no updates out of order.

Wave t has step t of every job that has one. Its pieces go, the largest first, into the first micro-
batch with room from the job's release on, which is S micro-batches behind the job's last piece of
step t - 1:

    release(j, t) = S + max over pieces i of step t - 1 of position(j, t - 1, i)

So pieces of a wave fill what the wave before has left in the micro-batches behind a job's last
one, which merges the last bins of one wave with the first of the next, and a micro-batch stays
empty only where no job may run. If all pieces of a wave are mixed, all jobs end late in it, and at
depth S > 1 all of them wait. If jobs come in groups one after the other (as in LoRAFusion, arXiv
2510.00206), one group runs while another waits; if the longest chain of steps comes first, it waits
least. These orders are tried, and for few pieces a search of orders and the bins of
`penstock.batching.pack_bins` for each wave. The shortest schedule is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from penstock.batching import pack_bins
from penstock.batching.packing import FirstFit
from penstock.lora._order_search import Positions, Step, search_orders
from penstock.lora._schedule import JobBatches, JobPiece, Schedule, find_bound
from penstock.units import parse_bytes, parse_count

# Pieces that are placed over all tries: some seconds of Python.
_MOST_PLACEMENTS = 200_000
_MOST_TO_SEARCH = 400  # pieces, for bins of `pack_bins`
# Waves of more than one bin for which HiGHS may search.
_MOST_SEARCHES = 4

_Piece = tuple[int, int, int]  # size, number of the job, number of the piece


def pack(
    jobs: Iterable[JobBatches],
    cap: int | str,
    *,
    pipeline_depth: int = 1,
    time_limit: float = 5.0,
) -> Schedule:
    """Put the pieces of many jobs into few micro-batches below a cap, each job's steps in order.

    Example:
        >>> jobs = [JobBatches("a", [[6, 2], [5]]), JobBatches("b", [[3], [4]])]
        >>> pack(jobs, 9).loads
        (9, 6, 5)

    Args:
        jobs: The jobs, with names that differ; the steps of one may be more than those of another.
        cap: The most that the pieces of a micro-batch may add up to, in the unit of their sizes;
            bytes also as a string such as `"8GiB"`.
        pipeline_depth: A job's pieces of one step lie at least so many micro-batches behind its
            last piece of the step before. 1: the step before has ended. With a pipeline, its
            number of stages.
        time_limit: Seconds that HiGHS may take over all waves; 0 leaves it out. Its searches are
            limited by steps as well, so the limit rarely ends them; `stopped` says where it did.

    Returns:
        The schedule, with its lower bound. Micro-batches without pieces are in it only where the
        depth forces them.

    Raises:
        TypeError: A job is no `JobBatches`.
        ValueError: There is no job, two have the same name, a piece is above the cap, or the depth
            is below 1.

    Source:
        Zhu et al., LoRAFusion (arXiv 2510.00206), the section on scheduling: bubble lemma, packing
        by first fit decreasing, merging.
    """
    jobs, cap = tuple(jobs), parse_bytes(cap, name="cap")
    _check_arguments(jobs, cap, pipeline_depth, time_limit)
    bound, bound_name = find_bound(jobs, cap, pipeline_depth)
    best, method = _pack_in_waves(jobs, cap, pipeline_depth, bound)
    stopped, num_pieces = False, sum(len(each) for job in jobs for each in job.batches)
    if _count(best) > bound and num_pieces <= _MOST_TO_SEARCH:
        tails = _tails(jobs, cap, pipeline_depth)
        searched = search_orders(jobs, cap, pipeline_depth, tails, bound)
        if _count(searched) < _count(best):
            best, method = searched, "search of orders"
    if _count(best) > bound and num_pieces <= _MOST_TO_SEARCH:
        searched, stopped = _pack_in_bins(jobs, cap, pipeline_depth, time_limit)
        if _count(searched) < _count(best):
            best, method = searched, "bins"
    return Schedule(
        jobs=jobs,
        cap=cap,
        pipeline_depth=pipeline_depth,
        micro_batches=_collect(jobs, best),
        lower_bound=bound,
        bound=bound_name,
        method=method,
        stopped=stopped,
    )


def _check_arguments(jobs: Sequence[JobBatches], cap: int, depth: int, time_limit: float) -> None:
    if not jobs:
        raise ValueError("jobs is empty; give at least one JobBatches")
    names: set[str] = set()
    for job in jobs:
        if not isinstance(job, JobBatches):
            raise TypeError(f"jobs must be JobBatches; got {type(job).__name__}")
        if job.name in names:
            raise ValueError(f"two jobs are named {job.name!r}; give each a name of its own")
        names.add(job.name)
        for step, sizes in enumerate(job.batches):
            if (largest := max(sizes)) > cap:
                raise ValueError(
                    f"job {job.name!r}, step {step}, piece {sizes.index(largest)} has size "
                    f"{largest}, above cap={cap}; raise the cap, or divide that piece"
                )
    parse_count(depth, name="pipeline_depth", least=1)
    if not time_limit >= 0:
        raise ValueError(f"time_limit must be a number of seconds >= 0; got {time_limit!r}")


def _pack_in_waves(
    jobs: Sequence[JobBatches], cap: int, depth: int, bound: int
) -> tuple[Positions, str]:
    """Return the best positions of several orders, and the name of the order."""
    num_pieces = sum(len(each) for job in jobs for each in job.batches)
    best, method = None, ""
    for number, (name, order) in enumerate(_orders(jobs, cap, depth)):
        if best is not None and (number + 1) * num_pieces > _MOST_PLACEMENTS:
            break
        positions = _place_pieces(jobs, cap, depth, order)
        if best is None or _count(positions) < _count(best):
            best, method = positions, name
        if _count(best) == bound:
            break
    assert best is not None
    return best, method


def _orders(
    jobs: Sequence[JobBatches], cap: int, depth: int
) -> Iterator[tuple[str, list[list[Step]]]]:
    """Yield orders with their names: lists of steps whose pieces are placed together."""
    ranks = _rank_jobs(jobs)
    steps = [(number, step) for number, job in enumerate(jobs) for step in range(job.num_steps)]
    for num_groups in _numbers_of_groups(len(jobs)):
        groups: dict[tuple[int, int], list[Step]] = {}
        for number, step in steps:
            groups.setdefault((step, ranks[number] * num_groups // len(jobs)), []).append(
                (number, step)
            )
        yield f"waves, groups of jobs: {num_groups}", [groups[key] for key in sorted(groups)]
        if num_groups == 1 and len(jobs) > 1:
            tails = _tails(jobs, cap, depth)
            chain = sorted(steps, key=lambda each: (-tails[each], each))
            yield "longest chain first", [[each] for each in chain]


def _tails(jobs: Sequence[JobBatches], cap: int, depth: int) -> dict[Step, int]:
    """Return the least micro-batches from the beginning of each step to the end of its job."""
    tails = {}
    for number, job in enumerate(jobs):
        tail = 1 - depth
        for step in reversed(range(job.num_steps)):
            sizes = job.batches[step]
            tail += -(-sum(sizes) // cap) + depth - 1
            tails[number, step] = tail
    return tails


def _numbers_of_groups(num_jobs: int) -> Iterator[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ... below the number of jobs, and that number."""
    groups = 1
    while groups < num_jobs:
        yield groups
        groups = max(groups + 1, groups * 4 // 3)
    yield num_jobs


def _rank_jobs(jobs: Sequence[JobBatches]) -> list[int]:
    """Return each job's rank: those of many steps first, and of these the largest."""
    total = [sum(map(sum, job.batches)) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda j: (-jobs[j].num_steps, -total[j], j))
    ranks = [0] * len(jobs)
    for rank, number in enumerate(order):
        ranks[number] = rank
    return ranks


def _waves(jobs: Sequence[JobBatches]) -> Iterator[list[int]]:
    """Yield the jobs that have a step 0, a step 1, and so on."""
    running = list(range(len(jobs)))
    step = 0
    while running := [number for number in running if jobs[number].num_steps > step]:
        yield running
        step += 1


def _place_pieces(
    jobs: Sequence[JobBatches], cap: int, depth: int, order: list[list[Step]]
) -> Positions:
    """Return the micro-batches of all pieces, placed in an order of steps, the largest first."""
    row = FirstFit(cap, sum(sum(map(sum, job.batches)) for job in jobs) // cap + 1)
    positions: Positions = [[[0] * len(each) for each in job.batches] for job in jobs]
    release = [0] * len(jobs)
    for steps in order:
        pieces = [
            (-size, number, piece, step)
            for number, step in steps
            for piece, size in enumerate(jobs[number].batches[step])
        ]
        pieces.sort()
        for size, number, piece, step in pieces:
            positions[number][step][piece] = row.place(-size, release[number])
        for number, step in steps:
            release[number] = max(positions[number][step]) + depth
    return positions


def _pack_in_bins(
    jobs: Sequence[JobBatches], cap: int, depth: int, seconds: float
) -> tuple[Positions, bool]:
    """Return the micro-batches of all pieces, each wave by the bins of `pack_bins`."""
    deadline = time.monotonic() + seconds
    row = FirstFit(cap)
    positions: Positions = [[[0] * len(each) for each in job.batches] for job in jobs]
    release = [0] * len(jobs)
    searches, stopped = 0, False
    for step, running in enumerate(_waves(jobs)):
        pieces: list[_Piece] = [
            (size, number, piece)
            for number in running
            for piece, size in enumerate(jobs[number].batches[step])
        ]
        can_search = searches < _MOST_SEARCHES
        left = max(deadline - time.monotonic(), 0.0) if can_search else 0.0
        packing = pack_bins([size for size, _, _ in pieces], cap, time_limit=left)
        searches += packing.num_bins > 1
        stopped |= packing.stopped or (can_search and left == 0)
        bins = sorted(
            zip(packing.bins, packing.loads, strict=True),
            key=lambda each: max(release[pieces[place][1]] for place in each[0]),
        )
        ends = [0] * len(jobs)
        for places, load in bins:
            first = max(release[pieces[place][1]] for place in places)
            position = row.place(load, first)
            for place in places:
                _, number, piece = pieces[place]
                positions[number][step][piece] = position
                ends[number] = max(ends[number], position)
        for number in running:
            release[number] = ends[number] + depth
    return positions, stopped


def _count(positions: Positions) -> int:
    """Return the number of micro-batches."""
    return 1 + max(max(each) for job in positions for each in job)


def _collect(jobs: Sequence[JobBatches], positions: Positions) -> tuple[tuple[JobPiece, ...], ...]:
    """Return the pieces of each micro-batch, by job and number."""
    micro_batches: list[list[JobPiece]] = [[] for _ in range(_count(positions))]
    for job, of_job in zip(jobs, positions, strict=True):
        for step, (sizes, of_step) in enumerate(zip(job.batches, of_job, strict=True)):
            for piece, (size, position) in enumerate(zip(sizes, of_step, strict=True)):
                micro_batches[position].append(JobPiece(job.name, step, piece, size))
    return tuple(map(tuple, micro_batches))
