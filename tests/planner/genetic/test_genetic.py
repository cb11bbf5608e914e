import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from penstock.errors import InfeasibleError
from penstock.planner import Budget, check
from penstock.planner.genetic import _genetic
from penstock.planner.genetic._evaluator import Evaluator
from penstock.planner.genetic._genes import (
    Schedules,
    cross_allocations,
    geometric_classes,
    mutate_allocation,
    random_classes,
)
from penstock.planner.genetic._genetic import derive, plan_genetic
from penstock.planner.paging._accesses import (
    ordered_step,
    peak_of_program_order,
)
from penstock.planner.paging._timing import Speeds

UNIT = 256


def plan(graph, *, device_bytes, seed=0, time_limit=60.0, **options):
    return plan_genetic(
        graphs.request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
            profile=graphs.machine(out=UNIT, back=UNIT),
            seconds=[1.0] * len(graph.operators),
            seed=seed,
            time_limit=time_limit,
            **options,
        )
    )


@pytest.fixture
def short_search(monkeypatch):
    monkeypatch.setattr(_genetic, "POPULATION", 8)
    monkeypatch.setattr(_genetic, "STAGNATION", 2)


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


def evaluator(graph, *, share):
    speeds = Speeds([1.0 + 0.1 * index for index in range(len(graph.operators))], 97.0, 131.0)
    return Evaluator(graph, int(peak_of_program_order(graph) * share), speeds)


@settings(max_examples=200)
@given(
    graph=graphs.step_graphs(max_operators=14),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.7, 1.0, 1.5]),
)
def test_the_engine_finds_what_python_derives(graph, seed, share):
    rng = random.Random(seed)
    engine = evaluator(graph, share=share)
    order = Schedules(graph).mutate(range(len(graph.operators)), rng.random(), rng)
    classes = geometric_classes(engine.sizes, rng.choice([1.0, 2.0, 4.0]))
    found = engine.evaluate(order, classes, {name: rng.randint(0, 4) for name in classes})
    if found is None:
        return
    allocation, seconds = found
    derived = derive(graph, order, allocation, engine.sizes, engine.speeds, passes=2)
    assert derived is not None
    assert derived.arrangement.step_seconds == seconds  # the same operations in the same order


def test_the_engine_finds_it_where_much_is_swapped():
    graph = graphs.chain_step(30, weight_bytes=3 * UNIT, activation_bytes=8 * UNIT)
    engine = evaluator(graph, share=0.4)
    classes = geometric_classes(engine.sizes, 1.0)
    found = engine.evaluate(range(len(graph.operators)), classes, {})
    assert found is not None
    order = range(len(graph.operators))
    derived = derive(graph, order, found[0], engine.sizes, engine.speeds, passes=2)
    assert derived is not None
    assert len(derived.arrangement.writes) > 20
    assert derived.arrangement.step_seconds == found[1]


@given(graph=graphs.step_graphs(min_operators=2, max_operators=9))
def test_demand_is_what_lives_at_once(graph):
    engine = evaluator(graph, share=1.0)
    step = ordered_step(graph)
    most = sum(
        size * count for size, count in zip(engine.sizes, engine.demand(step.order), strict=True)
    )
    assert most + step.workspace_bytes >= peak_of_program_order(graph, in_place=True)


@given(seed=st.integers(0, 1000))
def test_allocations_fit_and_hold_every_operator(seed):
    rng = random.Random(seed)
    graph = graphs.in_units(graphs.random_graph(rng, 9), UNIT)
    step = ordered_step(graph)
    engine = evaluator(graph, share=1.5)
    sizes = engine.sizes
    first = engine.evaluate(step.order, geometric_classes(sizes, 1.0), {})
    second = engine.evaluate(step.order, geometric_classes(sizes, 4.0), dict.fromkeys(range(9), 5))
    assert first is not None
    assert second is not None
    genes = mutate_allocation(*cross_allocations(first[0], second[0], rng), 0.5, rng)
    for found in (first, second, engine.evaluate(step.order, *genes)):
        if found is None:
            continue
        allocation = found[0]
        used = sum(sizes[name] * count for name, count in allocation.num_objects.items())
        assert used <= engine.capacity
        assert set(allocation.class_of_size) == set(allocation.num_objects)
        for visit in step.visits:
            at_once = {*visit.needs, *visit.creates}
            names = [allocation.class_of_size[sizes.index(step.num_bytes[v])] for v in at_once]
            assert all(names.count(name) <= allocation.num_objects[name] for name in names)


@given(num_sizes=st.integers(1, 20), seed=st.integers(0, 1000))
def test_random_classes_are_named_by_their_largest_size(num_sizes, seed):
    classes = random_classes(range(1, num_sizes + 1), random.Random(seed))
    assert list(classes) == sorted(classes)
    assert all(classes[name] == name for name in classes)


def test_classes_of_a_ratio():
    assert geometric_classes([1, 2, 3, 8, 9], 1.0) == (0, 1, 2, 3, 4)
    assert geometric_classes([1, 2, 3, 8, 9], 2.0) == (0, 2, 2, 4, 4)
