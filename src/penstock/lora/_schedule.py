"""Schedules of jobs: pieces of their steps in micro-batches, and a checker that trusts nothing.

Micro-batches have numbers 0, 1, 2, ...; in all of them a job's pieces of step t come S or more
micro-batches before those of step t + 1. With S = 1 that is the order of the steps. With S stages
of a pipeline it is the bubble lemma of LoRAFusion (arXiv 2510.00206): the update of step t has been
made in every stage when step t + 1 enters the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from penstock.batching.packing import least_bins
from penstock.errors import PlanError
from penstock.tables import Report


@dataclass(frozen=True)
class JobBatches:
    """A job's steps, each of which is an update of its adapter after pieces of data.

    Example:
        >>> JobBatches("summaries", [[512, 300], [480, 256]]).num_steps
        2

    Raises:
        TypeError: A size is no whole number.
        ValueError: The name is empty, there are no steps, a step has no pieces, or a size is below
            1.
    """

    name: str
    """Name of the job, for messages and records; jobs that are packed together differ in it."""
    batches: Sequence[Sequence[int]]
    """For each step the sizes of its pieces, whole numbers >= 1 in any unit that adds up: tokens or
    bytes. A piece is not divided. Kept as tuples."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a job must be a string of characters; got {self.name!r}")
        if len(self.batches) == 0:
            raise ValueError(f"job {self.name!r} has no steps: give it at least one batch")
        batches = tuple(self._read_step(step, each) for step, each in enumerate(self.batches))
        object.__setattr__(self, "batches", batches)

    def _read_step(self, step: int, sizes: Any) -> tuple[int, ...]:
        if hasattr(sizes, "detach"):
            sizes = sizes.detach().cpu().numpy()
        array = np.asarray(sizes)
        if array.size == 0:
            raise ValueError(f"job {self.name!r} has no pieces in step {step}; leave that step out")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(
                f"the pieces of job {self.name!r} in step {step} must be whole numbers, one per "
                f"piece; got dtype {array.dtype} of shape {array.shape}"
            )
        if (smallest := int(array.min())) < 1:
            raise ValueError(
                f"job {self.name!r}, step {step}, piece {int(array.argmin())}: a size must be at "
                f"least 1; got {smallest}"
            )
        return tuple(array.tolist())

    @property
    def num_steps(self) -> int:
        """Number of updates."""
        return len(self.batches)


class JobPiece(NamedTuple):
    """A piece of a job's data in a micro-batch."""

    job: str
    step: int
    piece: int
    """Number of the piece within its step."""
    size: int


@dataclass(frozen=True, kw_only=True)
class Schedule(Report, title="schedule of jobs"):
    """Micro-batches of several jobs, in their order; printing it shows a table.

    Example:
        >>> schedule = pack([JobBatches("a", [[6, 2], [5]]), JobBatches("b", [[3], [4]])], 9)
        >>> [[tuple(piece) for piece in each] for each in schedule.micro_batches]
        [[('a', 0, 0, 6), ('b', 0, 0, 3)], [('a', 0, 1, 2), ('b', 1, 0, 4)], [('a', 1, 0, 5)]]
        >>> schedule.validate()
    """

    jobs: tuple[JobBatches, ...]
    """The jobs as they were given."""
    cap: int
    """The most that the pieces of a micro-batch add up to, in the unit of their sizes."""
    pipeline_depth: int
    """The least difference of the numbers of micro-batches of a job's consecutive steps."""
    micro_batches: tuple[tuple[JobPiece, ...], ...]
    """The pieces of each micro-batch, by job (in the order of `jobs`) and number. An empty one is a
    bubble: nothing can run there."""
    lower_bound: int
    """A number of micro-batches that no schedule of these jobs is below, in waves or not."""
    bound: str
    """The bound that it is: "all pieces" (L2 of Martello and Toth for all of them, which is at
    least their sum over the cap) or "steps of job 'name'" (L2 of each of its steps, and the micro-
    batches that must lie between them)."""
    method: str
    """The order of first fit that found the schedule ("waves" in a number of groups of jobs,
    "longest chain first", "search of orders"), or "bins" of `penstock.batching.pack_bins`."""
    stopped: bool
    """True if a time limit ended a search. If not, the same jobs give the same schedule."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, bubbles included."""
        return len(self.micro_batches)

    @property
    def num_bubbles(self) -> int:
        """Number of micro-batches without pieces."""
        return sum(not each for each in self.micro_batches)

    @property
    def loads(self) -> tuple[int, ...]:
        """Sizes of the pieces of each micro-batch, added up."""
        return tuple(sum(piece.size for piece in each) for each in self.micro_batches)

    def validate(self) -> None:
        """Check every rule again, from the jobs and the micro-batches alone.

        Raises:
            PlanError: A rule is broken; `rule` is its name and the message says where. The rules:
                "name" (jobs differ in their names), "piece" (each piece is one of a job, with its
                size), "duplicate" and "missing" (each comes once), "cap", "order" (by job and
                number within a micro-batch), "step" (steps come one after the other), "depth" (and
                so far apart), "bubble" (an empty micro-batch could not be left out), "bound".
        """
        check_schedule(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain data, for JSON."""
        return {
            "jobs": [
                {"name": job.name, "batches": [list(each) for each in job.batches]}
                for job in self.jobs
            ],
            "cap": self.cap,
            "pipeline_depth": self.pipeline_depth,
            "micro_batches": [[piece._asdict() for piece in each] for each in self.micro_batches],
            "lower_bound": self.lower_bound,
            "bound": self.bound,
            "method": self.method,
            "stopped": self.stopped,
        }

    def _rows(self) -> list[tuple[str, object]]:
        loads = [load for load in self.loads if load]
        return [
            ("num_jobs", len(self.jobs)),
            ("num_steps", sum(job.num_steps for job in self.jobs)),
            ("num_pieces", sum(map(len, self.micro_batches))),
            ("cap", self.cap),
            ("pipeline_depth", self.pipeline_depth),
            ("num_micro_batches", self.num_micro_batches),
            ("num_bubbles", self.num_bubbles),
            ("lower_bound", self.lower_bound),
            ("bound", self.bound),
            ("mean_load", sum(loads) / max(len(loads), 1)),
            ("least_load", min(loads, default=0)),
            ("method", self.method),
        ]


def find_bound(jobs: Iterable[JobBatches], cap: int, depth: int) -> tuple[int, str]:
    """Return a number of micro-batches that no schedule is below, and the name of that bound.

        max(L2(all pieces),  max over jobs of (sum over steps t of L2(step t)) + (T - 1) (S - 1))

    Between the last micro-batch of a step and the first of the next one lie S - 1 others.
    """
    best, name, total = 0, "all pieces", list[int]()
    for job in jobs:
        total += chain.from_iterable(job.batches)
        least = sum(1 if len(each) == 1 else least_bins(each, cap) for each in job.batches)
        least += (job.num_steps - 1) * (depth - 1)
        if least > best:
            best, name = least, f"steps of job {job.name!r}"
    of_all = least_bins(total, cap)
    return (of_all, "all pieces") if of_all >= best else (best, name)


def check_schedule(schedule: Schedule) -> None:
    """Raise `PlanError` for the first rule that a schedule breaks; see `Schedule.validate`."""
    numbers = {job.name: number for number, job in enumerate(schedule.jobs)}
    if len(numbers) < len(schedule.jobs):
        raise PlanError("two jobs have the same name", rule="name")
    ends = _check_pieces(schedule, numbers)
    for job in schedule.jobs:
        _check_steps(schedule, job, ends)
    _check_bubbles(schedule, ends)
    least, name = find_bound(schedule.jobs, schedule.cap, schedule.pipeline_depth)
    if (schedule.lower_bound, schedule.bound) != (least, name):
        raise PlanError(
            f"lower_bound={schedule.lower_bound} by {schedule.bound}, but it is {least} by {name}",
            rule="bound",
        )


_Ends = dict[tuple[str, int], tuple[int, int]]  # the first and last micro-batch of a job's step


def _check_pieces(schedule: Schedule, numbers: dict[str, int]) -> _Ends:
    """Check that each piece is one of a job's, the cap and the order within a micro-batch."""
    batches = {job.name: (numbers[job.name], job.batches) for job in schedule.jobs}
    seen: set[tuple[int, int, int]] = set()
    ends: _Ends = {}
    for number, pieces in enumerate(schedule.micro_batches):
        load, before = 0, (-1, -1, -1)
        for name, step, piece, size in pieces:
            job, steps = batches.get(name, (-1, ()))
            if not (0 <= step < len(steps) and 0 <= piece < len(steps[step])):
                where = _name_piece(number, name, step, piece)
                raise PlanError(f"{where} is no piece of the jobs", rule="piece")
            if size != steps[step][piece]:
                where = _name_piece(number, name, step, piece)
                raise PlanError(
                    f"{where} has size {size}, but the job's is {steps[step][piece]}", rule="piece"
                )
            if (place := (job, step, piece)) in seen:
                where = _name_piece(number, name, step, piece)
                raise PlanError(f"{where} comes a second time", rule="duplicate")
            seen.add(place)
            if place < before:
                where = _name_piece(number, name, step, piece)
                raise PlanError(f"{where} is not behind those before it", rule="order")
            if place[:2] != before[:2]:
                first, _ = ends.get((name, step), (number, number))  # numbers ascend
                ends[name, step] = first, number
            before, load = place, load + size
        if load > schedule.cap:
            jobs = ", ".join(sorted({repr(piece.job) for piece in pieces}))
            raise PlanError(
                f"micro-batch {number} has {load}, above the cap of {schedule.cap} (jobs {jobs})",
                rule="cap",
            )
    for number, job in enumerate(schedule.jobs):
        _check_missing(number, job, seen)
    return ends


def _check_missing(number: int, job: JobBatches, seen: Collection[tuple[int, int, int]]) -> None:
    """Check that each piece of a job is in a micro-batch."""
    for step, sizes in enumerate(job.batches):
        for piece in range(len(sizes)):
            if (number, step, piece) not in seen:
                raise PlanError(
                    f"job {job.name!r}, step {step}, piece {piece} is in no micro-batch",
                    rule="missing",
                )


def _name_piece(number: int, name: str, step: int, piece: int) -> str:
    return f"micro-batch {number}: job {name!r}, step {step}, piece {piece}"


def _check_steps(schedule: Schedule, job: JobBatches, ends: _Ends) -> None:
    """Check that a job's steps come one after the other, and far enough apart."""
    for step in range(1, job.num_steps):
        _, last = ends[job.name, step - 1]
        first, _ = ends[job.name, step]
        message = (
            f"micro-batch {first}: job {job.name!r}, step {step} begins, and step {step - 1} ends "
            f"in micro-batch {last}"
        )
        if first <= last:
            raise PlanError(message, rule="step")
        if first - last < schedule.pipeline_depth:
            raise PlanError(
                f"{message}, less than pipeline_depth={schedule.pipeline_depth} apart",
                rule="depth",
            )


def _check_bubbles(schedule: Schedule, ends: _Ends) -> None:
    """Check that each bubble lies between steps of a job that are just far enough apart."""
    needed: set[int] = set()
    for (name, step), (first, _) in ends.items():
        last = ends[name, step - 1][1] if step else first
        if step and first - last == schedule.pipeline_depth:
            needed.update(range(last + 1, first))
    for number, pieces in enumerate(schedule.micro_batches):
        if not pieces and number not in needed:
            raise PlanError(
                f"micro-batch {number} is empty, and no job's steps need it", rule="bubble"
            )
