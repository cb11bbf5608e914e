import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graph_cases
from penstock.errors import InfeasibleError
from penstock.planner import Budget, check, min_working_set
from penstock.planner._request import LinkRates
from penstock.planner.genetic import _genetic
from penstock.planner.genetic._genes import (
    Schedules,
    cross_allocations,
    geometric_classes,
    mutate_allocation,
    random_classes,
)
from penstock.planner.genetic._genetic import Evaluator, plan_genetic
from penstock.planner.paging._accesses import (
    order_step,
    peak_of_program_order,
)
from penstock.planner.search._offsets import _chain_ends

UNIT = 256


def plan(graph, *, device_bytes, seed=0, time_limit=60.0, **options):
    return plan_genetic(
        graph_cases.request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
            profile=graph_cases.machine(out=UNIT, back=UNIT),
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
@given(graph=graph_cases.step_graphs(max_operators=9), share=st.sampled_from([0.5, 0.75, 1.0]))
@pytest.mark.usefixtures("short_search")
def test_every_plan_passes_the_checker(graph, share):
    try:
        found = plan(graph, device_bytes=int(peak_of_program_order(graph) * share))
    except InfeasibleError:
        return
    check(graph, found)


@pytest.mark.usefixtures("short_search")
def test_the_same_seed_gives_the_same_plan():
    graph = graph_cases.chain_step(5, weight_bytes=UNIT, activation_bytes=3 * UNIT)
    plans = [plan(graph, device_bytes=22 * UNIT, seed=7) for _ in range(2)]
    assert plans[0].order == plans[1].order
    assert plans[0].placements == plans[1].placements
    assert plans[0].transfers


@pytest.mark.usefixtures("processor_time")
def test_the_search_gains():
    graph = graph_cases.chain_step(6, weight_bytes=2 * UNIT, activation_bytes=3 * UNIT)
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


@pytest.mark.usefixtures("short_search")
def test_the_order_of_the_program_is_kept_where_it_is_asked_for():
    graph = graph_cases.random_graph(random.Random(1), 9)
    device_bytes = int(peak_of_program_order(graph) * 0.8)
    orders = [plan(graph, device_bytes=device_bytes, reorder=each).order for each in (True, False)]
    assert orders[0] != orders[1] == tuple(range(len(graph.operators)))


def test_too_little_memory_is_said():
    graph = graph_cases.chain_step(3, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    least = min_working_set(graph)
    for device_bytes, proved in ((least - 1, True), (least, False)):
        with pytest.raises(InfeasibleError, match="size classes") as raised:
            plan(graph, device_bytes=device_bytes)
        assert raised.value.proved is proved
        assert raised.value.minimum_device_bytes == least


@given(graph=graph_cases.step_graphs(min_operators=2, max_operators=9), seed=st.integers(0, 1000))
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
    seconds = [1.0 + 0.1 * index for index in range(len(graph.operators))]
    capacity = int(peak_of_program_order(graph) * share)
    return Evaluator(graph, seconds, LinkRates(97.0, 131.0), capacity)


def random_candidate(graph, seed, share):
    """The evaluation of random genes, None where they do not fit, and the evaluator."""
    rng = random.Random(seed)
    engine = evaluator(graph, share=share)
    order = Schedules(graph).mutate(range(len(graph.operators)), rng.random(), rng)
    classes = geometric_classes(engine.sizes, rng.choice([1.0, 2.0, 4.0]))
    return engine.evaluate(order, classes, {name: rng.randint(0, 4) for name in classes}), engine


@settings(max_examples=200)
@given(
    graph=graph_cases.step_graphs(max_operators=14),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.7, 1.0, 1.5]),
)
def test_stays_have_slots_of_their_class_for_themselves(graph, seed, share):
    found, engine = random_candidate(graph, seed, share)
    if found is None:
        return
    allocation, residency, offsets = found
    sequence = residency.sequence
    num_positions, num_bytes = len(sequence.order), sequence.problem.object_bytes.tolist()
    slots = {}  # the class of each slot, by its address
    base = 0
    for name, count in sorted(allocation.num_objects.items()):
        slots |= {base + slot * engine.sizes[name]: name for slot in range(count)}
        base += count * engine.sizes[name]
    taken = set()
    for first, last, offset in zip(*_chain_ends(residency.parts(slack=0.0)), offsets, strict=True):
        name = allocation.class_of_size[engine.sizes.index(num_bytes[first["object"]])]
        assert slots[offset] == name
        for position in range(first["start"], last["end"]):
            assert (offset, position % num_positions) not in taken
            taken.add((offset, position % num_positions))


@settings(max_examples=200)
@given(
    graph=graph_cases.step_graphs(max_operators=14),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.7, 1.0, 1.5]),
)
def test_intervals_of_the_engine_are_those_of_plans(graph, seed, share):
    found, engine = random_candidate(graph, seed, share)
    if found is None:
        return
    allocation, residency, _ = found
    sequence, names = residency.sequence, sorted(allocation.num_objects)
    class_of_size = [names.index(name) for name in allocation.class_of_size]
    class_of_object = np.array([class_of_size[i] if i >= 0 else -1 for i in engine.size_of_object])
    found = sequence.evict_in_classes(
        class_of_object.astype(np.int32),
        np.array([allocation.num_objects[name] for name in names], np.int64),
        np.array([engine.sizes[name] for name in names], np.int64),
    )
    assert found is not None
    evicted, intervals = found
    assert evicted.tolist() == residency.evicted.tolist()
    expected = [
        (first["start"], last["end"], first["arrives"], last["leaves"])
        for first, last in zip(*_chain_ends(residency.parts(slack=0.0)), strict=True)
    ]
    assert intervals[["start", "end", "arrives", "leaves"]].tolist() == expected


def test_what_leaves_is_written_and_comes_back():
    graph = graph_cases.chain_step(30, weight_bytes=3 * UNIT, activation_bytes=8 * UNIT)
    engine = evaluator(graph, share=0.4)
    found = engine.evaluate(range(len(graph.operators)), geometric_classes(engine.sizes, 1.0), {})
    assert found is not None
    _, residency, _ = found
    assert residency.sequence.dirty(residency.evicted).sum() > 20
    made = plan(graph, device_bytes=int(peak_of_program_order(graph) * 0.4), time_limit=0.5)
    check(graph, made)
    assert made.transfers


@given(graph=graph_cases.step_graphs(min_operators=2, max_operators=9))
def test_values_are_counted_where_most_live_at_once(graph):
    engine = evaluator(graph, share=1.0)
    step = order_step(graph)
    most = sum(
        size * count
        for size, count in zip(engine.sizes, engine.count_values(step.order), strict=True)
    )
    used = {value for accesses in step.accesses for value in accesses.needs}
    unused = sum(step.num_bytes[value] for value in step.inputs if value not in used)
    assert most + unused + graph.workspace_bytes >= peak_of_program_order(graph, in_place=True)


@given(seed=st.integers(0, 1000))
def test_allocations_fit_and_hold_every_operator(seed):
    rng = random.Random(seed)
    graph = graph_cases.in_units(graph_cases.random_graph(rng, 9), UNIT)
    step = order_step(graph)
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
        for accesses in step.accesses:
            at_once = {*accesses.needs, *accesses.creates}
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
