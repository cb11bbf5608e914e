"""Where any plan of a small graph exists, one is found, and what is refused with proof has none.

    PYTHONPATH=src:tests/planner:tests/planner/search python -m test_tight 1000

counts over so many graphs.
"""

import dataclasses
import random
import sys
from collections import Counter

from brute_force import brute_force
from graph_cases import chain_step, machine, random_graph, request
from penstock.errors import InfeasibleError
from penstock.planner import Budget, check, min_working_set, plan


def tight_case(seed):
    """A graph of at most 7 operators, a budget at what operators need or a little above it."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        graph = chain_step(1, in_place=rng.random() < 0.5)
    else:
        graph = random_graph(rng, rng.randint(2, 7))
    operators = [dataclasses.replace(o, seconds=float(rng.randint(0, 6))) for o in graph.operators]
    graph = dataclasses.replace(graph, operators=tuple(operators))
    device_bytes = min_working_set(graph) + rng.choice([-1, 0, 0, 0, 1, 2, 3])
    out, back = rng.choice([(1.0, 1.0), (0.5, 1.0), (2.0, 3.0), (0.2, 0.2)])
    return graph, device_bytes, machine(out=out, back=back)


def outcome(seed, *, limit):
    """What became of a case: "planned" or "refused", by whom else, and whether with proof."""
    graph, device_bytes, profile = tight_case(seed)
    try:
        found = plan(
            graph,
            device_memory=device_bytes,
            host_memory=1 << 20,
            machine=profile,
            time_limit=limit,
        )
        check(graph, found)
        assert found.peak_device_bytes <= device_bytes
        return "planned"
    except InfeasibleError as error:
        refusal = error
    assert refusal.minimum_device_bytes is not None
    assert refusal.proved == (device_bytes < refusal.minimum_device_bytes)
    seconds = [o.seconds for o in graph.operators]
    budget = Budget(device_bytes=device_bytes, host_bytes=1 << 20)
    try:
        best = brute_force(
            request(graph, budget=budget, profile=profile, seconds=seconds, time_limit=limit)
        )
    except InfeasibleError as error:
        return "refused with proof" if refusal.proved else f"refused by both, {error.proved}"
    check(graph, best)
    return "refused where a plan exists"


def test_no_plan_is_refused_where_brute_force_has_one():
    outcomes = Counter(outcome(seed, limit=0.5) for seed in range(20))
    assert outcomes["planned"] > 12
    assert outcomes["refused with proof"] > 0
    assert not outcomes["refused where a plan exists"]


if __name__ == "__main__":
    total: Counter = Counter()
    for seed in range(int(sys.argv[1])):
        found = outcome(seed, limit=4.0)
        total[found] += 1
        if "exists" in found:
            sys.stdout.write(f"seed {seed}: {found}\n")
    sys.stdout.write(f"{dict(total)}\n")
