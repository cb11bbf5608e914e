"""Schedules are valid, few batches long, and never longer than by depth."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batching import schedule
from penstock.batching.dynamic import _schedule
from penstock.batching.dynamic._schedule import order_by_numpy, order_nodes
from penstock.batching.dynamic._typed_graph import NodeGraph
from penstock.codegen import find_compiler


@st.composite
def graphs(draw, max_nodes=40, num_types=4):
    num_nodes = draw(st.integers(0, max_nodes))
    types = draw(st.lists(st.integers(0, num_types - 1), min_size=num_nodes, max_size=num_nodes))
    arguments = [
        draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else []
        for node in range(num_nodes)
    ]
    return types, arguments


def check(types, arguments, result):
    """All that must hold of a schedule of any graph."""
    done = set()
    for kind, batch in zip(result.types, result.batches, strict=True):
        assert batch and {types[node] for node in batch} == {kind}
        for node in batch:
            assert done.issuperset(arguments[node]) and node not in done
        done.update(batch)
    assert len(done) == len(types) == sum(map(len, result.batches))
    depth = []
    for node in range(len(types)):
        depth.append(1 + max((depth[a] for a in arguments[node]), default=-1))
    by_depth = len(set(zip(depth, types, strict=True)))
    assert result.lower_bound <= result.num_batches <= by_depth
    return by_depth


def longest_chains(types, arguments):
    """The lower bound, from its definition."""
    chains = [Counter() for _ in types]
    for node, mine in enumerate(arguments):
        for argument in mine:
            chains[node] |= chains[argument]  # the larger count of each type
        chains[node] = chains[node] + Counter([types[node]])
    worst = Counter()
    for chain in chains:
        worst |= chain
    return sum(worst.values())


def fewest(types, arguments):
    """The fewest batches, by trying everything."""
    everything = frozenset(range(len(types)))

    @cache
    def rest(done):
        if done == everything:
            return 0
        ready = [n for n in everything - done if done.issuperset(arguments[n])]
        return 1 + min(
            rest(done | {n for n in ready if types[n] == kind})
            for kind in {types[n] for n in ready}
        )

    return rest(frozenset())


@pytest.fixture(params=["C++", "NumPy"])
def planner(request, monkeypatch):
    """Both planners: the one of C++, and what there is without a compiler."""
    if request.param == "NumPy":
        monkeypatch.setattr(_schedule, "load_library", lambda: None)
    elif find_compiler() is None:
        pytest.skip("there is no compiler")
    return request.param


several_planners = HealthCheck.function_scoped_fixture  # the same planner for all examples


@settings(max_examples=200, suppress_health_check=[several_planners])
@given(graph=graphs())
def test_any_graph_is_scheduled_within_its_bounds(planner, graph):
    result = schedule(*graph)
    check(*graph, result)
    assert result.lower_bound == longest_chains(*graph)


@settings(max_examples=60)
@given(graphs(max_nodes=9, num_types=3))
def test_small_graphs_are_scheduled_nearly_best(graph):
    best = fewest(*graph)
    assert best <= schedule(*graph).num_batches <= best + 1


@pytest.mark.parametrize("seed", range(5))
def test_trees_and_chains_meet_the_bound(planner, seed):
    source = random.Random(seed)
    types, arguments = [], []
    for _ in range(8):  # trees: leaf 0, inner 1, root 2
        roots = []
        for _ in range(source.randint(2, 15)):
            types.append(0)
            arguments.append([])
            roots.append(len(types) - 1)
        while len(roots) > 1:
            at = source.randrange(len(roots) - 1)
            types.append(1)
            arguments.append([roots[at], roots.pop(at + 1)])
            roots[at] = len(types) - 1
        types.append(2)
        arguments.append(roots)
    for _ in range(5):  # two chains over the same inputs, as in a BiLSTM: 3, then 4 and 5, then 6
        length = source.randint(1, 12)
        first = len(types)
        types += [3] * length + [4] * length + [5] * length + [6] * length
        arguments += [[]] * length
        arguments += [[first + k, *([first + length + k - 1] if k else [])] for k in range(length)]
        backward = first + 2 * length
        arguments += [
            [first + length - 1 - k, *([backward + k - 1] if k else [])] for k in range(length)
        ]
        arguments += [[first + length + k, backward + length - 1 - k] for k in range(length)]
    result = schedule(types, arguments)
    assert check(types, arguments, result) > result.num_batches == result.lower_bound


def lattices(seed, num_lattices, length, num_spans):
    """Characters in a row (0), and words that span several (1, 2) and merge with them (3)."""
    source = np.random.default_rng(seed)
    types, arguments = [], []

    def add(kind, *reads):
        types.append(kind)
        arguments.append(list(reads))
        return len(types) - 1

    for _ in range(num_lattices):
        states: list[int] = []
        ends: dict[int, list[int]] = {}
        for at in range(int(source.integers(length // 2, length))):
            state = add(0, *states[-1:])
            if words := ends.pop(at, None):
                state = add(3, state, *words)
            states.append(state)
            for _ in range(int(source.poisson(num_spans))):
                ends.setdefault(at + int(source.integers(1, 5)), []).append(
                    add(1, add(2, state)) if source.random() < 0.5 else add(2, state)
                )
    return types, arguments


@pytest.mark.parametrize("num_spans", [0.2, 0.5, 1.0])
def test_random_lattices_come_near_the_bound(num_spans):
    """Their types interleave at random, so that the bound itself is out of reach."""
    for seed in range(3):
        graph = lattices(seed, 32, 40, num_spans)
        result = schedule(*graph)
        by_depth = check(*graph, result)
        assert result.num_batches <= 1.35 * result.lower_bound
        assert result.num_batches < 0.7 * by_depth


@pytest.mark.skipif(find_compiler() is None, reason="searching needs a compiler")
def test_searching_finds_what_the_rule_does_not():
    shorter = 0
    for seed in range(6):
        types, arguments = lattices(seed, 16, 30, 0.7)
        graph = NodeGraph.of(types, arguments)
        by_rule, searched = order_nodes(graph), order_nodes(graph, search=True)
        assert len(searched[2]) <= len(by_rule[2]) <= len(order_by_numpy(graph)[2])
        shorter += len(searched[2]) <= 0.97 * len(by_rule[2])
    assert shorter >= 4


def test_depth_is_not_exceeded_where_the_rule_exceeds_it(planner):
    types = [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0]
    arguments = [[], [0], [], [2], [], [2], [1, 4], [], [6], [], [5], [8, 7]]
    assert len(order_by_numpy(NodeGraph.of(types, arguments))[2]) == 7
    assert schedule(types, arguments).num_batches == check(
        types, arguments, schedule(types, arguments)
    )


@pytest.mark.skipif(find_compiler() is None, reason="there is no compiler")
@settings(max_examples=100)
@given(graph=graphs())
def test_batches_by_depth_are_counted(graph):
    nodes = NodeGraph.of(*graph)
    library = _schedule.load_library()
    assert library is not None
    _, num_by_depth = _schedule.order_by_library(library, nodes, search=False, frees_most=False)
    assert num_by_depth == check(*graph, schedule(*graph))


def test_published_graphs_meet_the_bars(data):
    for path in sorted((data / "typed_graphs").glob("*.txt")):
        rows = [list(map(int, line.split())) for line in path.read_text().splitlines()[1:]]
        types, arguments = [row[0] for row in rows], [row[2:] for row in rows]
        result = schedule(types, arguments)
        check(types, arguments, result)
        most = 1.1 if path.name.startswith("lattice") else 1.0
        assert result.num_batches <= most * result.lower_bound, path.name


def test_an_empty_graph_has_no_batches():
    result = schedule([], [])
    assert (result.batches, result.lower_bound) == ([], 0)
    assert "lower bound" in str(result)


def test_types_may_be_any_numbers():
    assert schedule([10**9, 7], [[], [0]]).types == [10**9, 7]


def test_an_argument_may_be_read_twice():
    assert schedule([0, 1], [[], [0, 0]]).batches == [[0], [1]]


@pytest.mark.parametrize(
    ("types", "arguments", "error", "message"),
    [
        ([0, 0], [[1], [0]], ValueError, "node 0 reads node 1.*in a cycle none can"),
        ([0], [[0]], ValueError, "node 0 reads node 0"),
        ([0], [[-1]], ValueError, "node 0 reads node -1"),
        ([0, 1], [[]], ValueError, "one entry per node, 2; got 1"),
        ([0, -1], [[], []], ValueError, "types must be >= 0; node 1 has -1"),
        (["a"], [[]], TypeError, "types must be whole numbers"),
        ([0, 0], [[], [0.5]], TypeError, "arguments must be whole numbers"),
    ],
)
def test_what_is_no_graph_is_refused(types, arguments, error, message):
    with pytest.raises(error, match=message):
        schedule(types, arguments)
