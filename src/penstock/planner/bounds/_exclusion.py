"""A bound for any order by two operands of one operator that cannot be made beside each other.

Where neither of two operands fits beside the operator that makes the other one, the one that is
made first leaves before the other is made and returns after it, and little else fits beside both.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.bounds._forced import Forced
from penstock.planner.bounds._moments import Moment, MomentsProgram, TimedStep, least_bytes

_LARGE = 1 / 16  # of the arena, at least, are values of a pair


class Exclusion(NamedTuple):
    """Two operands, neither of which fits beside the operator that makes the other."""

    user: int  # operator that needs both
    absent: int  # value that is absent while the other one is made
    other: int


def find_exclusion(graph: StepGraph, capacity: int) -> Exclusion | None:
    """Return the pair of the most bytes; None if there is none."""
    least = [least_bytes(graph, index) for index in range(len(graph.operators))]
    largest = max((storage.num_bytes for storage in graph.storages), default=0)
    of, producers = graph.storage_of_value, graph.producers

    def excludes(made: int, absent: int) -> bool:
        producer = producers[made]
        assert producer is not None
        return does_not_fit(graph, producer, [absent], capacity, least[producer])

    found: Exclusion | None = None
    most_bytes = 0
    for user, operator in enumerate(graph.operators):
        large = [
            value
            for value in operator.needs
            if (producer := producers[value]) is not None
            and not graph.storage(value).persistent
            and graph.num_bytes(value) >= max(1, capacity * _LARGE)
            and least[producer] + largest > capacity
        ]
        for one, other in itertools.combinations(large, 2):
            num_bytes = graph.num_bytes(one) + graph.num_bytes(other)
            if num_bytes <= most_bytes or of[one] == of[other]:
                continue
            if excludes(one, other) and excludes(other, one):
                found, most_bytes = Exclusion(user, one, other), num_bytes
    return found


def does_not_fit(
    graph: StepGraph, index: int, values: Sequence[int], capacity: int, least: int
) -> bool:
    """Return whether an operator of so many bytes does not fit beside values."""
    operator = graph.operators[index]
    used = {graph.storage_of_value[value] for value in (*operator.needs, *operator.makes)}
    beside = (value for value in values if graph.storage_of_value[value] not in used)
    return least + sum(map(graph.num_bytes, beside)) > capacity


def exclusion_bound(
    graph: StepGraph,
    forced: Forced,
    operator_seconds: Sequence[float],
    capacity: int,
    rates: LinkRates,
    pair: Exclusion,
    *,
    time_limit: float,
) -> float | None:
    """Bound the time of a step in any order by two large operands of an operator w.

    Operators a and b make values A and B of this step, w needs both, and

        bytes of b + A > M,  bytes of a + B > M

    with the least bytes of an operator's operands and results. So A has no place while b runs, nor
    has B while a runs. Of all runs of a and b before the first one of w take the last; let it be
    one of b (else exchange a and b); it starts at r. A has no place at r and is not made again
    after it, so it comes in after this run has ended, before w starts, at s(w). What comes in has
    left before r, and after the first run of a, which started at s(a). So

        r - s(a) >= c(a) + A / out + runs of operators that do not fit beside A
        s(w) - r >= c(b) + min(A, B) / in + runs of operators that do not fit beside A and B.

    The first holds since nothing else runs while a does, and A keeps its place until it has left.
    For the second let t be when the one that comes in last, A or B, begins to: from t on both keep
    their places until w starts, since B, if it does not come in, has its place since r. The time
    before s(a), between these moments and after s(w) follows from the linear program of
    `MomentsProgram` for these moments and one before: the start of the operator with the most
    excess of those that a and b follow. The bound is the lesser of the two cases.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    begun = time.monotonic()
    step = TimedStep(graph, np.asarray(operator_seconds, np.float64), capacity, rates)
    bounds: list[float] = []
    for case in (pair, pair._replace(absent=pair.other, other=pair.absent)):
        left = time_limit - (time.monotonic() - begun)
        bound = _solve(step, forced, case, left) if left > 0 else None
        if bound is None:
            return None
        bounds.append(bound)
    least = min(bounds)
    return least if least < np.inf else None


def _solve(step: TimedStep, forced: Forced, pair: Exclusion, time_limit: float) -> float | None:
    """Return the least time if the last run that makes one of a pair makes the other one.

    It is infinite where that cannot be, as where the other one is made first and not again.
    """
    graph, rates = step.graph, step.rates
    a, b = graph.producers[pair.absent], graph.producers[pair.other]
    assert a is not None and b is not None
    earlier = forced.ancestors_of(a) | forced.ancestors_of(b)
    later = forced.descendants_of(pair.user)
    earlier[a] = later[pair.user] = True
    moments = [_first_run(forced, a), Moment(b, False, earlier, later)]
    moments.append(_first_run(forced, pair.user))
    excess = np.where(
        forced.ancestors_of(a) & forced.ancestors_of(b), forced.anywhere - step.capacity, 0.0
    )
    if excess.max() > 0:
        moments.insert(0, _first_run(forced, int(np.argmax(excess))))
    program = MomentsProgram(step, moments)
    last = len(moments) - 1  # the part between the run of b and w
    program.program.set_bounds(program.here[pair.absent, last], 0.0, 0.0)
    if (a, last) in program.runs:
        program.program.set_bounds(program.runs[a, last], 0.0, 0.0)
    if (b, last) in program.runs:
        program.program.set_bounds(program.runs[b, last], 1.0, 1.0)
    one, other = graph.num_bytes(pair.absent), graph.num_bytes(pair.other)
    for part, runs, values, moving in (
        (last - 1, a, [pair.absent], one / rates.outward),
        (last, b, [pair.absent, pair.other], min(one, other) / rates.inward),
    ):
        apart = (
            (index, number)
            for index, number in program.runs
            if number == part
            and index != runs
            and does_not_fit(graph, index, values, step.capacity, least_bytes(graph, index))
        )
        program.add_time([part], float(step.seconds[runs]) + moving, apart)
    bound = program.solve(time_limit)
    return np.inf if program.program.proved_infeasible else bound


def _first_run(forced: Forced, operator: int) -> Moment:
    return Moment(operator, True, forced.ancestors_of(operator), forced.descendants_of(operator))
