"""Schedules of jobs: against brute force, against bounds, and mutants that the checker refuses."""

from __future__ import annotations

import dataclasses
import doctest
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lora import JobBatches, JobPiece, Schedule, _order_search, _packing, _schedule, pack
from penstock.solvers import LinearProgram

Sizes = list[list[list[int]]]  # of each piece, by job and step

DISTRIBUTIONS = [(1, 10), (1, 6), (3, 7), (2, 5)]  # of 10


def name_jobs(sizes: Sizes) -> list[JobBatches]:
    return [JobBatches(f"job {number}", each) for number, each in enumerate(sizes)]


def draw_jobs(seed: int, num_pieces: int, most_per_step: int, unit: int = 1) -> Sizes:
    random = np.random.default_rng(seed)
    low, high = DISTRIBUTIONS[seed % len(DISTRIBUTIONS)]
    jobs: Sizes = [[] for _ in range(random.integers(1, 5))]
    while num_pieces > 0:
        count = min(num_pieces, int(random.integers(1, most_per_step + 1)))
        sizes = random.integers(low * unit, high * unit + 1, count).tolist()
        jobs[random.integers(len(jobs))].append(sizes)
        num_pieces -= count
    return [job for job in jobs if job]


def least_by_force(jobs: Sizes, cap: int, depth: int) -> int:
    """The fewest micro-batches: every way to fill each one, as far as pieces are released.

    Leaving out a piece that would fit saves nothing, so only full micro-batches are tried.
    """

    @cache
    def least(state: tuple[tuple[int, tuple[int, ...], int] | None, ...]) -> int:
        # Of each job: its step, the sizes that are left of it, the micro-batches until its release.
        if all(job is None for job in state):
            return 0
        ready = [
            (number, size)
            for number, job in enumerate(state)
            if job and job[2] == 0
            for size in job[1]
        ]
        return 1 + min(least(after(state, taken)) for taken in fillings(ready))

    def fillings(ready: list[tuple[int, int]]) -> set[tuple[tuple[int, int], ...]]:
        found = set()

        def choose(place: int, load: int, taken: tuple[int, ...]) -> None:
            if place == len(ready):
                others = (size for i, (_, size) in enumerate(ready) if i not in taken)
                if all(load + size > cap for size in others):
                    found.add(tuple(ready[i] for i in taken))
                return
            if load + ready[place][1] <= cap:
                choose(place + 1, load + ready[place][1], (*taken, place))
            choose(place + 1, load, taken)

        choose(0, 0, ())
        return found

    def after(state, taken):
        result = []
        for number, job in enumerate(state):
            if job is None:
                result.append(None)
                continue
            step, left, wait = job
            left = list(left)
            for other, size in taken:
                if other == number:
                    left.remove(size)
            if left:
                result.append((step, tuple(left), max(wait - 1, 0)))
            elif step + 1 < len(jobs[number]):
                result.append((step + 1, tuple(sorted(jobs[number][step + 1])), depth - 1))
            else:
                result.append(None)
        return tuple(result)

    return least(tuple((0, tuple(sorted(job[0])), 0) for job in jobs))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(15))
def test_few_pieces_are_within_a_micro_batch_of_the_optimum(seed: int, depth: int):
    sizes = draw_jobs(1000 * depth + seed, num_pieces=10, most_per_step=3)
    schedule = pack(name_jobs(sizes), 10, pipeline_depth=depth)
    schedule.validate()
    fewest = least_by_force(sizes, 10, depth)
    assert schedule.lower_bound <= fewest <= schedule.num_micro_batches <= fewest + 1


def fits_by_highs(sizes: list[int], cap: int, num_bins: int) -> bool:
    """Whether so many bins are enough, as far as HiGHS finds them in a second."""
    program = LinearProgram()
    columns = [[program.column(upper=1.0, integer=True) for _ in range(num_bins)] for _ in sizes]
    for each in columns:
        program.row(each, [1.0] * num_bins, lower=1.0, upper=1.0)
    for number in range(num_bins):
        program.row([each[number] for each in columns], [float(size) for size in sizes], upper=cap)
    program.solve(time_limit=1.0)
    return program.has_solution


@pytest.mark.parametrize("seed", range(8))
def test_one_step_of_sixty_pieces_is_within_a_micro_batch_of_the_optimum(seed: int):
    random = np.random.default_rng(seed)
    low, high = DISTRIBUTIONS[seed % 4]
    sizes = random.integers(10 * low, 10 * high, (3, 20))
    schedule = pack(name_jobs([[each.tolist()] for each in sizes]), 100, time_limit=1.0)
    schedule.validate()
    if schedule.num_micro_batches > schedule.lower_bound + 1:
        fewer = schedule.num_micro_batches - 2
        assert not fits_by_highs(sizes.ravel().tolist(), 100, fewer)


def test_one_step_is_packed_as_well_as_bins_are():
    """Pieces that fill their micro-batches exactly, three in each: first fit needs 24 for 20."""
    random, sizes = np.random.default_rng(0), []
    for _ in range(20):
        first = int(random.integers(380_000, 490_000))
        second = int(random.integers(250_000, (1_000_000 - first) // 2 + 1))
        sizes += [first, second, 1_000_000 - first - second]
    schedule = pack(name_jobs([[sizes[:30]], [sizes[30:]]]), 1_000_000, time_limit=1.0)
    schedule.validate()
    assert schedule.num_micro_batches <= 21 and schedule.method == "bins"


job_sizes = st.lists(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(job_sizes, st.integers(20, 60), st.integers(1, 5))
def test_any_jobs_give_a_schedule_that_keeps_the_rules(sizes: Sizes, cap: int, depth: int):
    jobs = name_jobs(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_order_search, "_PLACEMENTS", 1000)
        schedule = pack(jobs, cap, pipeline_depth=depth, time_limit=0)
        schedule.validate()
        assert schedule == pack(jobs, cap, pipeline_depth=depth, time_limit=0)
    # The rules once more, in other words than the checker's.
    assert max(schedule.loads) <= cap and schedule.micro_batches[-1]
    where: dict[tuple[str, int], list[int]] = {}
    for number, pieces in enumerate(schedule.micro_batches):
        for name, step, _, _ in pieces:
            where.setdefault((name, step), []).append(number)
    for (name, step), numbers in where.items():
        if step:
            assert min(numbers) >= max(where[name, step - 1]) + depth
    given_pieces = sorted(
        JobPiece(job.name, step, piece, size)
        for job in jobs
        for step, each in enumerate(job.batches)
        for piece, size in enumerate(each)
    )
    assert sorted(chain.from_iterable(schedule.micro_batches)) == given_pieces


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("per_step", [1000, 10])
def test_a_hundred_thousand_pieces_are_close_to_the_bound(per_step: int, depth: int):
    random = np.random.default_rng(0)
    sizes = random.integers(50, 1500, (10, 10_000 // per_step, per_step))
    jobs = [JobBatches(f"job {number}", each) for number, each in enumerate(sizes)]
    schedule = pack(jobs, 4096, pipeline_depth=depth)
    schedule.validate()
    assert max(schedule.loads) <= 4096
    assert schedule.num_micro_batches <= 1.02 * schedule.lower_bound


def test_waves_fill_what_the_wave_before_has_left():
    """Job b may run its second step beside the end of job a's first one."""
    schedule = pack(name_jobs([[[9, 4], [9]], [[1], [5], [1]]]), 10)
    schedule.validate()
    assert schedule.num_micro_batches == schedule.lower_bound == 3


@pytest.mark.parametrize("most_to_search", [0, 400])
def test_a_micro_batch_is_empty_only_where_one_job_has_to_wait(monkeypatch, most_to_search: int):
    monkeypatch.setattr(_packing, "_MOST_TO_SEARCH", most_to_search)
    alone = pack(name_jobs([[[5], [5], [5]]]), 10, pipeline_depth=3)
    alone.validate()
    assert [len(each) for each in alone.micro_batches] == [1, 0, 0, 1, 0, 0, 1]
    assert (alone.num_bubbles, alone.lower_bound) == (4, 7)
    three = pack(name_jobs([[[6], [6], [6]]] * 3), 10, pipeline_depth=3)
    three.validate()
    assert (three.num_bubbles, three.num_micro_batches, three.lower_bound) == (0, 9, 9)


def test_the_search_of_orders_saves_micro_batches(monkeypatch):
    jobs = name_jobs(draw_jobs(2, num_pieces=60, most_per_step=8))
    searched = pack(jobs, 10, pipeline_depth=2)
    searched.validate()
    monkeypatch.setattr(_packing, "_MOST_TO_SEARCH", 0)
    assert pack(jobs, 10, pipeline_depth=2).num_micro_batches > searched.num_micro_batches


@pytest.mark.parametrize("depth", [1, 3])
def test_orders_are_judged_by_what_their_placement_gives(depth: int):
    """Also where pieces have the same key, and keys of later steps come before earlier ones."""
    chance = np.random.default_rng(depth)
    for seed in range(30):
        jobs = name_jobs(draw_jobs(seed, num_pieces=25, most_per_step=6))
        keys = [[chance.integers(0, 9, len(each)).tolist() for each in job.batches] for job in jobs]
        runs = [_order_search._order_job(i, job, keys[i]) for i, job in enumerate(jobs)]
        positions = _order_search._place(jobs, 10, depth, keys)
        pieces = [
            (position, size)
            for job, of_job in zip(jobs, positions, strict=True)
            for sizes, of_step in zip(job.batches, of_job, strict=True)
            for size, position in zip(sizes, of_step, strict=True)
        ]
        last = max(position for position, _ in pieces)
        load = sum(size for position, size in pieces if position == last)
        found = _order_search._score(sorted(chain.from_iterable(runs)), len(jobs), 10, depth)
        assert found == (last + 1, load)


def test_jobs_of_different_lengths_end_by_themselves():
    schedule = pack(name_jobs([[[5]] * 6, [[5]], [[5]] * 3]), 10)
    schedule.validate()
    assert schedule.num_micro_batches == 6
    assert schedule.bound == "steps of job 'job 0'"


def test_pieces_of_a_job_are_adjacent_and_in_order():
    schedule = pack(name_jobs([[[1, 2, 3]], [[4, 1, 1]]]), 100)
    assert [tuple(piece)[:3] for piece in schedule.micro_batches[0]] == [
        ("job 0", 0, 0), ("job 0", 0, 1), ("job 0", 0, 2),
        ("job 1", 0, 0), ("job 1", 0, 1), ("job 1", 0, 2),
    ]  # fmt: skip


# Mutants: each breaks one rule of a valid schedule.

MicroBatches = list[list[JobPiece]]


@pytest.fixture(scope="module")
def valid() -> Schedule:
    """Two bubbles, 3 between the steps of job a, and micro-batches with room."""
    jobs = [JobBatches("a", [[6, 2], [5, 1], [3]]), JobBatches("b", [[3], [4, 4]])]
    schedule = pack(jobs, 10, pipeline_depth=3)
    schedule.validate()
    assert schedule.num_bubbles >= 2 and len(schedule.micro_batches[0]) >= 2
    return schedule


def drop(batches: MicroBatches) -> None:
    batches[0].pop()


def repeat(batches: MicroBatches) -> None:
    batches[-1].append(batches[-1][-1])


def rename(batches: MicroBatches) -> None:
    batches[0][0] = batches[0][0]._replace(job="c")


def renumber(batches: MicroBatches) -> None:
    batches[0][0] = batches[0][0]._replace(piece=7)


def renumber_below_zero(batches: MicroBatches) -> None:
    batches[0][0] = batches[0][0]._replace(step=-1)


def resize(batches: MicroBatches) -> None:
    batches[0][0] = batches[0][0]._replace(size=1)


def swap_within(batches: MicroBatches) -> None:
    batches[0].reverse()


def move_to_the_front(batches: MicroBatches) -> None:
    """The last piece of job a's last step comes before the first one."""
    batches.insert(0, batches.pop())


def move_near(batches: MicroBatches) -> None:
    """All from the second step on comes one micro-batch earlier."""
    del batches[next(i for i, each in enumerate(batches) if not each)]


def lengthen(batches: MicroBatches) -> None:
    batches.append([])


def lengthen_inside(batches: MicroBatches) -> None:
    """A bubble more than the depth needs."""
    batches.insert(next(i for i, each in enumerate(batches) if not each), [])


@pytest.mark.parametrize(
    ("mutate", "rule", "message"),
    [
        (drop, "missing", r"job 'a', step 0, piece 1 is in no micro-batch"),
        (repeat, "duplicate", r"micro-batch 6: job 'a', step 2, piece 0 comes a second time"),
        (rename, "piece", r"micro-batch 0: job 'c', step 0, piece 0 is no piece"),
        (renumber, "piece", r"micro-batch 0: job 'a', step 0, piece 7 is no piece"),
        (renumber_below_zero, "piece", r"step -1, piece 0 is no piece"),
        (resize, "piece", r"micro-batch 0: job 'a', step 0, piece 0 has size 1"),
        (swap_within, "order", r"micro-batch 0: job 'a', step 0, piece \d is not behind"),
        (move_to_the_front, "step", r"job 'a', step 2 begins, and step 1 ends in micro-batch"),
        (move_near, "depth", r"less than pipeline_depth=3 apart"),
        (lengthen, "bubble", r"micro-batch 7 is empty"),
        (lengthen_inside, "bubble", r"is empty, and no job's steps need it"),
    ],
)
def test_a_mutant_is_refused(
    valid: Schedule, mutate: Callable[[MicroBatches], None], rule: str, message: str
):
    batches = [list(each) for each in valid.micro_batches]
    mutate(batches)
    mutant = dataclasses.replace(valid, micro_batches=tuple(map(tuple, batches)))
    with pytest.raises(PlanError, match=message) as caught:
        mutant.validate()
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        ({"cap": 7}, "cap", r"micro-batch 0 has 8, above the cap of 7 \(jobs 'a'\)"),
        ({"pipeline_depth": 4}, "depth", "less than pipeline_depth=4 apart"),
        ({"lower_bound": 8}, "bound", "lower_bound=8 by steps of job 'a', but it is 7"),
        ({"jobs": (JobBatches("a", [[1]]), JobBatches("a", [[1]]))}, "name", "same name"),
    ],
)
def test_a_mutant_of_the_statements_is_refused(valid: Schedule, changes, rule: str, message: str):
    with pytest.raises(PlanError, match=message) as caught:
        dataclasses.replace(valid, **changes).validate()
    assert caught.value.rule == rule


def broken_rule(schedule: Schedule) -> str:
    try:
        schedule.validate()
    except PlanError as error:
        return error.rule
    return ""


def moves(schedule: Schedule) -> Iterator[tuple[JobPiece, int]]:
    """Each piece, with each other micro-batch."""
    for number, pieces in enumerate(schedule.micro_batches):
        for piece in pieces:
            yield from (
                (piece, other) for other in range(len(schedule.micro_batches)) if other != number
            )


def test_a_piece_that_moves_is_refused_or_moves_where_it_may(valid: Schedule):
    refused = 0
    for piece, other in moves(valid):
        batches = [[each for each in pieces if each != piece] for pieces in valid.micro_batches]
        batches[other] = sorted([*batches[other], piece])
        mutant = dataclasses.replace(valid, micro_batches=tuple(map(tuple, batches)))
        steps = {  # first and last micro-batch of each step
            key: [n for n, each in enumerate(batches) if any(p[:2] == key for p in each)]
            for key in {p[:2] for p in chain.from_iterable(batches)}
        }
        is_far = all(
            min(numbers) - max(steps[name, step - 1]) >= 3
            for (name, step), numbers in steps.items()
            if step
        )
        fits = max(sum(each.size for each in pieces) for pieces in batches) <= 10
        rule = broken_rule(mutant)
        assert rule in (("", "bubble") if is_far and fits else ("cap", "step", "depth"))
        refused += rule != ""
    assert refused > 5


# Arguments and results.


@pytest.mark.parametrize(
    ("name", "batches", "error", "message"),
    [
        ("", [[1]], ValueError, "name of a job"),
        (3, [[1]], ValueError, "name of a job"),
        ("a", [], ValueError, "job 'a' has no steps: give it"),
        ("a", [[1], []], ValueError, "job 'a' has no pieces in step 1; leave"),
        ("a", [[1], [2, 0]], ValueError, "job 'a', step 1, piece 1: a size must be at least 1"),
        ("a", [[1.5]], TypeError, "job 'a' in step 0 must be whole numbers"),
        ("a", [[[1]]], TypeError, "of shape"),
    ],
)
def test_wrong_jobs_are_named(name, batches, error, message: str):
    with pytest.raises(error, match=message):
        JobBatches(name, batches)


@pytest.mark.parametrize(
    ("jobs", "options", "error", "message"),
    [
        ([], {}, ValueError, "jobs is empty"),
        ([[1]], {}, TypeError, "must be JobBatches; got list"),
        ([JobBatches("a", [[1]])] * 2, {}, ValueError, "two jobs are named 'a'"),
        (
            [JobBatches("a", [[1], [2, 12]])],
            {},
            ValueError,
            "job 'a', step 1, piece 1 has size 12, above cap=10; raise the cap, or divide",
        ),
        ([JobBatches("a", [[1]])], {"pipeline_depth": 0}, ValueError, "pipeline_depth"),
        ([JobBatches("a", [[1]])], {"pipeline_depth": 1.5}, TypeError, "pipeline_depth"),
        ([JobBatches("a", [[1]])], {"time_limit": -1}, ValueError, "time_limit"),
    ],
)
def test_wrong_arguments_are_named(jobs, options, error, message: str):
    with pytest.raises(error, match=message):
        pack(jobs, 10, **options)


def test_arrays_and_tensors_are_taken():
    wanted = JobBatches("a", [[1, 2], [3, 4]])
    assert JobBatches("a", np.array([[1, 2], [3, 4]])) == wanted
    assert JobBatches("a", torch.tensor([[1, 2], [3, 4]])) == wanted
    assert pack([wanted], "1KiB").cap == 1024


def test_a_schedule_prints_and_is_plain_data(valid: Schedule):
    said = str(valid)
    assert "bubbles" in said and "lower bound" in said and "steps of job 'a'" in said
    plain = json.loads(json.dumps(valid.to_dict()))
    assert plain["micro_batches"][0][0] == {"job": "a", "step": 0, "piece": 0, "size": 6}
    assert plain["jobs"][1] == {"name": "b", "batches": [[3], [4, 4]]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        valid.cap = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("module", [_packing, _schedule])
def test_the_examples_of_docstrings_run(module):
    failed, attempted = doctest.testmod(module, extraglobs={"pack": pack})
    assert attempted > 0 and failed == 0
