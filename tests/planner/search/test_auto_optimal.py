"""On graphs of at most nine operators plans are as fast as the fastest of all plans.

    PYTHONPATH=src:tests/planner:tests/planner/search python -m test_auto_optimal 1000

counts over so many graphs, with and without the exact finish.
"""

import functools
import random
import sys
import time
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from brute_force import brute_force
from graph_cases import chain_step, machine, random_graph, request
from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner import Budget, check, lower_bound
from penstock.planner.search import _auto_plan
from penstock.planner.search._auto_plan import plan_auto
from penstock.planner.search._problem import Problem
from penstock.planner.search._sequence import OperatorSequence

pytestmark = pytest.mark.usefixtures("processor_time")

# Of the first 150 seeds those of which brute force has too many plans to try in a moment.
TOO_MANY = {
    0, 5, 8, 10, 11, 12, 16, 18, 21, 33, 38, 39, 45, 46, 47, 59, 64, 65, 66, 67, 75, 76, 79, 80,
    81, 82, 89, 93, 97, 100, 102, 103, 105, 106, 109, 110, 113, 116, 120, 121, 126, 137, 138,
    139, 142, 144, 149,
}  # fmt: skip
LINKS = [(Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)]


def case(seed):
    """A graph, times, a budget between what operators need and the peak, and a machine."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        graph = chain_step(rng.randint(1, 2), in_place=rng.random() < 0.5)
    else:
        graph = random_graph(rng, rng.randint(2, 9))
    seconds = [float(rng.randint(0, 6)) for _ in graph.operators]
    sequence = OperatorSequence(Problem(graph, seconds), np.arange(len(seconds)))
    least, most = int(sequence.working_set.max()), int(sequence.base.max())
    workspace = max(operator.workspace_bytes for operator in graph.operators)
    device_bytes = least + round(rng.random() * (most - least)) + workspace
    out, back = rng.choice([(1.0, 1.0), (0.5, 1.0), (2.0, 3.0), (0.2, 0.2)])
    budget = Budget(device_bytes=device_bytes, host_bytes=1 << 20)
    return graph, seconds, budget, machine(out=out, back=back)


@functools.cache
def fastest(seed, limit):
    """The fastest plan of a case, None where there is none, and whether all were tried."""
    graph, seconds, budget, profile = case(seed)
    try:
        best = brute_force(
            request(graph, budget=budget, profile=profile, seconds=seconds, time_limit=limit)
        )
    except InfeasibleError as error:
        return None, error.proved
    return best, best.notes["complete"]


def compared(seed, *, limit):
    """How a plan compares with the fastest: "equal", "faster" (with more second runs), "slower"."""
    graph, seconds, budget, profile = case(seed)
    best, complete = fastest(seed, limit)
    if not complete:
        return "not known"
    asked = request(graph, budget=budget, profile=profile, seconds=seconds)
    bound = best.bound if best else lower_bound(asked)
    try:
        plan = plan_auto(
            request(graph, budget=budget, profile=profile, seconds=seconds, time_limit=4.0),
            bound=bound,
        )
    except InfeasibleError:
        return "slower" if best else "equal"
    check(graph, plan)
    assert plan.step_seconds >= bound.seconds - 1e-9
    if best is None or plan.step_seconds < best.step_seconds * (1 - 1e-6):
        return "faster"
    return "equal" if plan.step_seconds <= best.step_seconds * (1 + 1e-6) else "slower"


@pytest.mark.slow
def test_plans_of_small_graphs_are_the_fastest():
    counts = Counter(compared(seed, limit=20) for seed in range(150) if seed not in TOO_MANY)
    assert counts["not known"] == 0
    assert counts["equal"] + counts["faster"] >= 0.95 * counts.total() > 95


def test_the_finish_is_what_makes_them_so():
    seeds = range(1000, 1020)
    with mock.patch.object(_auto_plan, "MAX_OPERATORS", 0):
        without = Counter(compared(seed, limit=0.3) for seed in seeds)
    assert without["slower"] > 0
    assert not Counter(compared(seed, limit=0.3) for seed in seeds)["slower"]


if __name__ == "__main__":
    for finish in (True, False):
        began = time.monotonic()
        most = _auto_plan.MAX_OPERATORS if finish else 0
        with mock.patch.object(_auto_plan, "MAX_OPERATORS", most):
            found = Counter(compared(seed, limit=2.0) for seed in range(int(sys.argv[1])))
        seconds = time.monotonic() - began
        sys.stdout.write(f"finish={finish}: {dict(found)}, {seconds:.0f} s\n")
