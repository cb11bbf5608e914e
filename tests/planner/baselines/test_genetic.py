import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from penstock.errors import InfeasibleError
from penstock.planner import Budget, check
from penstock.planner.baselines import _genetic
from penstock.planner.baselines._genetic import plan_genetic
from penstock.planner.baselines._genetic_genes import (
    Schedules,
    cross_allocations,
    demand,
    distinct_sizes,
    geometric_classes,
    mutate_allocation,
    repair,
)
from penstock.planner.baselines._order import (
    ALIGNMENT_BYTES,
    ordered_step,
    peak_of_program_order,
)

UNIT = ALIGNMENT_BYTES


def plan(graph, *, device_bytes, seed=0, time_limit=60.0, **options):
    return plan_genetic(
        graph,
        operator_seconds=[1.0] * len(graph.operators),
        budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
        machine=graphs.machine(out=UNIT, back=UNIT),
        seed=seed,
        time_limit=time_limit,
        **options,
    )


@pytest.fixture
def short_search(monkeypatch):
    monkeypatch.setattr(_genetic, "POPULATION", 8)
    monkeypatch.setattr(_genetic, "GENERATIONS", 3)


@settings(max_examples=30)
@given(graph=graphs.step_graphs(max_operators=9), share=st.sampled_from([0.5, 0.75, 1.0]))
@pytest.mark.usefixtures("short_search")
def test_every_plan_passes_the_checker(graph, share):
    try:
        found = plan(graph, device_bytes=int(peak_of_program_order(graph) * share))
    except InfeasibleError:
        return
    check(graph, found)


@pytest.mark.usefixtures("short_search")
def test_the_same_seed_gives_the_same_plan():
    graph = graphs.chain_step(5, weight_bytes=UNIT, activation_bytes=3 * UNIT)
    plans = [plan(graph, device_bytes=22 * UNIT, seed=7) for _ in range(2)]
    assert plans[0].order == plans[1].order
    assert plans[0].placements == plans[1].placements
    assert plans[0].transfers


def test_the_search_gains():
    graph = graphs.chain_step(6, weight_bytes=2 * UNIT, activation_bytes=3 * UNIT)
    seen = []
    found = plan(
        graph,
        device_bytes=26 * UNIT,
        time_limit=2.0,
        progress=lambda found: seen.append(found.step_seconds),
    )
    check(graph, found)
    assert seen[-1] < seen[0]
    assert found.notes["num_evaluations"] > _genetic.POPULATION


def test_too_little_memory_is_said():
    graph = graphs.chain_step(3, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    with pytest.raises(InfeasibleError, match="size classes"):
        plan(graph, device_bytes=4 * UNIT)


@given(graph=graphs.step_graphs(min_operators=2, max_operators=9), seed=st.integers(0, 1000))
def test_children_and_mutants_are_topological_orders(graph, seed):
    rng = random.Random(seed)
    schedules = Schedules(graph)
    program = tuple(range(len(graph.operators)))
    first = schedules.mutate(program, 1.0, rng)
    second = schedules.mutate(program, 0.2, rng)
    for order in (first, second, schedules.cross(first, second, rng)):
        place = {index: position for position, index in enumerate(order)}
        assert len(place) == len(program)
        for index, before in enumerate(graph.predecessors):
            assert all(place[earlier] < place[index] for earlier in before)
    assert schedules.mutate(first, 0.0, rng) == first


@given(seed=st.integers(0, 1000))
def test_allocations_fit_and_hold_every_operator(seed):
    rng = random.Random(seed)
    graph = graphs.random_graph(rng, 9)
    step = ordered_step(graph)
    sizes = distinct_sizes(step)
    asked = demand(step, sizes)
    capacity = int(peak_of_program_order(graph) * 1.5)
    first = repair(geometric_classes(sizes, 1.0), {}, sizes, asked, capacity)
    second = repair(
        geometric_classes(sizes, 4.0), dict.fromkeys(range(9), 5), sizes, asked, capacity
    )
    assert first is not None
    assert second is not None
    genes = mutate_allocation(*cross_allocations(first, second, rng), 0.5, rng)
    for allocation in (first, second, repair(*genes, sizes, asked, capacity)):
        if allocation is None:
            continue
        used = sum(sizes[name] * count for name, count in allocation.num_objects.items())
        assert used <= capacity
        assert set(allocation.class_of_size) == set(allocation.num_objects)
        for counts in asked.least:
            for index, count in counts.items():
                assert allocation.num_objects[allocation.class_of_size[index]] >= count


def test_classes_of_a_ratio():
    assert geometric_classes([1, 2, 3, 8, 9], 1.0) == (0, 1, 2, 3, 4)
    assert geometric_classes([1, 2, 3, 8, 9], 2.0) == (0, 2, 2, 4, 4)
