"""Partitions: against brute force, what the checker refuses, and what is chosen where."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import numpy as np
import pytest

import penstock
from _networks import make_network, random_network
from penstock.errors import GraphFileError, InfeasibleError, PlanError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile, machine
from penstock.partitioner import Partition, _elimination, check, partition
from penstock.partitioner._bound import bound_by_levels, bound_exchanged_bytes
from penstock.partitioner._flat import solve_flat
from penstock.partitioner._fold import find_groups
from penstock.partitioner._mesh import PARTIAL, REPLICATED, find_moves, make_mesh
from penstock.partitioner._search import SplitSearch
from penstock.partitioner._split import Model
from penstock.partitioner._styles import METHODS
from penstock.partitioner.axes import find_axes
from penstock.solvers import can_solve

MACHINE = machine("h100-80gb")
ONE_NODE = dataclasses.replace(MACHINE, devices_per_node=256)
RANDOM_SEEDS = range(0, 300, 6)  # of all 300, 295 are split as brute force does


def random_case(seed: int) -> tuple[Model, int, int]:
    """A step, a number of devices, and a budget between the least and the most it can need."""
    graph = random_network(seed)
    axes = find_axes(graph)
    model = Model(graph, axes, find_groups(graph, axes, fold=False))
    devices = random.Random(seed).choice((2, 3))
    search = SplitSearch(model, MACHINE, None)
    search.run(devices)
    peaks = [each.peak_bytes for each in search.candidates]
    share = random.Random(seed + 1).random() ** 2
    return model, devices, int(min(peaks) + share * (max(peaks) - min(peaks)))


def compare(seed: int) -> bool:
    """Whether a random case is solved to the optimum; the rest must hold in every one."""
    model, devices, budget = random_case(seed)
    optimum = solve_flat(model, make_mesh((devices,), MACHINE), budget)
    assert optimum.is_proved
    search = SplitSearch(model, MACHINE, budget, solves_programs=False)
    search.run(devices)
    best = search.best()
    assert best is None or best.peak_bytes <= budget
    if optimum.step is None:
        assert best is None
        return True
    assert best is not None
    assert best.cost >= optimum.cost * (1 - 1e-6)
    assert search.lower_bound <= optimum.cost * (1 + 1e-6) + 1e-6
    assert bound_exchanged_bytes(model, devices, budget) <= best.exchanged_bytes + 1e-6
    assert bound_by_levels(model, devices) <= best.exchanged_bytes + 1e-6
    return best.cost <= optimum.cost * (1 + 1e-6) + 1e-6


@pytest.mark.skipif(not can_solve(), reason="needs highspy")
def test_random_steps_are_split_as_brute_force_does():
    results = [compare(seed) for seed in RANDOM_SEEDS]
    assert sum(results) >= math.ceil(0.95 * len(RANDOM_SEEDS))


@pytest.mark.skipif(not can_solve(), reason="needs highspy")
@pytest.mark.parametrize("budget", [None, 10**12])
def test_where_states_are_too_many_a_loose_budget_is_solved_by_the_integer_program(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_elimination, "MOST_STATES", 16)
    monkeypatch.setattr(_elimination, "_MOST_EARLY_STATES", 16)
    graph = random_network(0)
    axes = find_axes(graph)
    model = Model(graph, axes, find_groups(graph, axes, fold=False))
    optimum = solve_flat(model, make_mesh((3,), MACHINE), budget)
    found = []
    for solves_programs in (False, True):
        search = SplitSearch(model, MACHINE, budget, solves_programs=solves_programs)
        search.run(3)
        best = search.best()
        assert best is not None
        found.append(best.cost)
    assert found[0] > optimum.cost * 1.1
    assert found[1] == pytest.approx(optimum.cost)


@pytest.mark.parametrize("seed", [3, 8, 11])
def test_nothing_on_the_frontier_within_the_budget_exchanges_less(seed: int):
    graph = random_network(seed)
    for share in (0.4, 0.7, 1.0):
        points = plan(graph, 4).frontier
        budget = int(points[0].peak_device_bytes * 1.05 ** (20 * share))
        try:
            found = plan(graph, 4, budget)
        except InfeasibleError:
            continue
        within = [each for each in found.frontier if each.peak_device_bytes <= budget]
        assert found.exchanged_bytes == min(each.exchanged_bytes for each in within)


def plan(
    graph: StepGraph, devices: int, budget: int | None = None, profile: MachineProfile = MACHINE
) -> Partition:
    found = partition(graph, devices=devices, device_memory=budget, machine=profile, time_limit=30)
    check(graph, found)
    return found


def is_split(found: Partition, graph: StepGraph, name: str) -> bool:
    (index,) = (i for i, storage in enumerate(graph.storages) if storage.name == name)
    return any(stride > 0 for stride in found.placements[index])


def letters(found: Partition, graph: StepGraph, target: str = "aten.mm.default") -> set[str]:
    return {
        letter
        for operator, split in zip(graph.operators, found.splits, strict=True)
        if operator.target == target
        for letter in split
    }


def test_memory_in_plenty_gives_data_parallelism_and_little_of_it_split_parameters():
    graph = make_network(2**18, [64, 256, 64])
    loose = plan(graph, 256, profile=ONE_NODE)
    # The first layer has no gradient of its input: its weight is read once, and gathering that
    # costs what all-reducing its gradient does.
    assert not is_split(loose, graph, "weight1")
    assert letters(loose, graph) == {"m", "k"}  # rows of the batch, and sums over them
    assert loose.count_collectives().keys() <= {"all_reduce", "reduce_scatter", "all_gather"}
    bytes_of_weights = 4 * 2 * 64 * 256
    assert loose.exchanged_bytes <= 2 * bytes_of_weights * 255 / 256 + 1
    tight = plan(graph, 256, loose.frontier[0].peak_device_bytes, ONE_NODE)
    assert is_split(tight, graph, "weight0")
    assert is_split(tight, graph, "weight1")
    assert tight.peak_device_bytes < loose.peak_device_bytes
    assert tight.exchanged_bytes >= loose.exchanged_bytes


@pytest.mark.usefixtures("processor_time")
def test_between_nodes_fewer_bytes_are_exchanged_than_by_data_parallelism():
    graph = make_network(2**18, [64, 256, 64])
    found = plan(graph, 256)
    methods = {
        method: partition(graph, devices=256, machine=MACHINE, method=method)
        for method in ("batch", "fsdp", "tensor")
    }
    seconds = {method: each.exchange_seconds for method, each in methods.items()}
    assert found.exchange_seconds <= min(seconds.values()) * (1 + 1e-9)
    assert found.exchange_seconds < seconds["batch"] / 3


def test_sums_over_several_levels_exchange_what_one_level_would():
    mesh = make_mesh((4, 8), machine("h100-80gb"))
    sums, whole = (PARTIAL, PARTIAL), (REPLICATED, REPLICATED)
    moves = find_moves(320, sums, whole, mesh=mesh, extents=(80,))
    assert moves == (
        (1, "reduce_scatter", 280.0),
        (0, "all_reduce", 60.0),
        (1, "all_gather", 280.0),
    )
    assert sum(each.num_bytes for each in moves) == 2 * 320 * 31 / 32
    odd = find_moves(28, sums, whole, mesh=mesh, extents=(7,))
    assert odd is not None and {each.kind for each in odd} == {"all_reduce"}
    gathers = find_moves(320, (0, 0), whole, mesh=mesh, extents=(320,))
    assert gathers == ((0, "all_gather", 30.0), (1, "all_gather", 280.0))


def test_a_batch_of_one_gives_a_tensor_split():
    graph = make_network(1, [1024, 4096, 1024])
    found = plan(graph, 256)
    assert is_split(found, graph, "weight0")
    assert is_split(found, graph, "weight1")
    assert "m" not in letters(found, graph) or graph.operators[0].args[0].shape[0] == 1
    assert found.exchanged_bytes < 8 * 4 * 4096  # activations, not weights of 16 MiB


def test_chopping_splits_every_tensor():
    graph = make_network(8, [8, 16, 8])
    found = partition(graph, devices=4, machine=MACHINE, method="chop")
    check(graph, found)
    assert all(any(stride > 0 for stride in each) for each in found.placements)
    assert found.exchanged_bytes >= plan(graph, 4).exchanged_bytes


def test_the_search_knows_what_a_person_would_do():
    graph = random_network(7)
    axes = find_axes(graph)
    search = SplitSearch(Model(graph, axes, find_groups(graph, axes)), MACHINE, None)
    search.run(6)
    assert {each.origin for each in search.candidates} >= {*METHODS[1:]}
    best = search.best()
    assert best is not None
    assert best.cost == min(each.cost for each in search.candidates)


def test_what_does_not_fit_is_named():
    graph = make_network(1, [7, 11, 7])  # no axis is even
    with pytest.raises(InfeasibleError, match="weight0") as raised:
        partition(graph, devices=2, device_memory=100, machine=MACHINE)
    assert raised.value.proved
    assert raised.value.minimum_device_bytes is not None
    assert raised.value.minimum_device_bytes > 100


def test_operators_without_a_rule_run_whole_and_are_named():
    graph = make_network(8, [8, 8])
    operators = list(graph.operators)
    operators[1] = dataclasses.replace(operators[1], target="other.relu.default")
    graph = dataclasses.replace(graph, operators=tuple(operators))
    found = plan(graph, 2)
    assert dict(found.unknown) == {"other.relu.default": 2 * 4 * 64}
    assert found.splits[1] == ("",)


@pytest.mark.parametrize("seed", range(6))
def test_no_mesh_exchanges_less_than_the_bound(seed: int):
    graph = random_network(seed)
    axes = find_axes(graph)
    model = Model(graph, axes, find_groups(graph, axes))
    bounds = {}
    for devices in (2, 3, 4, 6, 12):
        search = SplitSearch(model, MACHINE, None)
        search.run(devices)
        least = min(each.exchanged_bytes for each in search.candidates)
        bounds[devices] = bound_by_levels(model, devices)
        assert bounds[devices] <= least + 1e-6
        if devices in (2, 3):  # the least but for repeated work, which has a price
            assert bounds[devices] >= 0.5 * least


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"devices": 0}, ValueError),
        ({"devices": 1}, ValueError),
        ({"devices": 2.0}, TypeError),
        ({"devices": "2"}, TypeError),
        ({"time_limit": "3"}, ValueError),
        ({"time_limit": 0}, ValueError),
        ({"seed": "a"}, TypeError),
        ({"graph": "a"}, TypeError),
        ({"graph": StepGraph(storages=(), storage_of_value=(), operators=())}, ValueError),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception]):
    given = {"graph": make_network(2, [2, 2]), "devices": 2, "machine": MACHINE, **options}
    with pytest.raises(error, match=next(iter(options))):
        partition(**given)


def test_a_machine_may_be_given_by_its_name():
    graph = make_network(8, [8, 16, 8])
    by_name, by_profile = (
        partition(graph, devices=2, machine=each, time_limit=2) for each in ("h100-80gb", MACHINE)
    )
    assert by_name.exchanged_bytes == by_profile.exchanged_bytes
    with pytest.raises(ValueError, match="built-in machines are"):
        partition(graph, devices=2, machine="h2")


GRAPH = make_network(8, [8, 16, 8])


@pytest.fixture(scope="module")
def found() -> Partition:
    return plan(GRAPH, 4)


def test_a_partition_is_plain_data(found: Partition):
    data = json.loads(json.dumps(found.to_dict()))
    assert Partition.from_dict(data, graph=GRAPH) == found
    data["peak_device_bytes"] += 1
    with pytest.raises(GraphFileError, match="checksum"):
        Partition.from_dict(data)
    with pytest.raises(GraphFileError, match="not for"):
        Partition.from_dict(found.to_dict(), graph=make_network(8, [8, 8]))
    with pytest.raises(GraphFileError, match="no partition"):
        Partition.from_dict({})


def test_a_partition_that_ranks_cannot_run_says_so(found: Partition):
    assert "not runnable" not in str(found)
    other = dataclasses.replace(found, notes={**found.notes, "is_written": False})
    assert "not runnable" in str(other)


def test_a_partition_is_a_table(found: Partition):
    assert "exchanged" in str(found)


def test_the_same_seed_gives_the_same_partition(found: Partition):
    again = plan(GRAPH, 4)
    names = ("placements", "splits", "mesh", "collectives", "peak_device_bytes")
    assert all(getattr(again, name) == getattr(found, name) for name in names)


def change(sequence: tuple, index: int, value: object) -> tuple:
    return (*sequence[:index], value, *sequence[index + 1 :])


def test_the_checker_refuses_what_is_wrong(found: Partition):
    weight = next(i for i, s in enumerate(GRAPH.storages) if s.name == "weight0")
    num_levels = len(found.mesh)
    largest = max(range(len(found.collectives)), key=lambda i: found.collectives[i].num_bytes)
    less = found.collectives[largest]._replace(num_bytes=1.0)
    other = (found.placements[weight][0] or 1, *(0,) * (num_levels - 1))
    flipped = (0,) * num_levels if any(found.placements[weight]) else other
    wrong = {
        "graph": {"graph_digest": "0"},
        "placement": {"placements": change(found.placements, weight, (3,) * num_levels)},
        "split": {"splits": change(found.splits, 0, ("z",) * num_levels)},
        "exchange": {"collectives": change(found.collectives, largest, less)},
        "memory": {"peak_device_bytes": found.peak_device_bytes - 1},
        "figures": {"exchanged_bytes": found.exchanged_bytes + 1},
    }
    for rule, fields in wrong.items():
        with pytest.raises(PlanError) as raised:
            check(GRAPH, dataclasses.replace(found, **fields))
        assert raised.value.rule == rule
    moved = dataclasses.replace(found, placements=change(found.placements, weight, flipped))
    with pytest.raises(PlanError):
        check(GRAPH, moved)
    with pytest.raises(PlanError) as raised:
        check(GRAPH, dataclasses.replace(found, device_bytes=found.peak_device_bytes - 1))
    assert raised.value.rule == "memory"


def test_layers_of_one_kind_are_one_group():
    graph = make_network(8, [8] * 12)
    axes = find_axes(graph)
    shallow = make_network(8, [8] * 8)
    few = find_groups(shallow, find_axes(shallow))
    groups = find_groups(graph, axes)
    assert len(groups.operators) == len(few.operators)
    assert sum(map(len, groups.operators)) == len(graph.operators)
    assert np.unique(groups.of_operator).tolist() == [*range(len(groups.operators))]


def test_the_function_is_public():
    assert penstock.partition is partition
    assert penstock.Partition is Partition
