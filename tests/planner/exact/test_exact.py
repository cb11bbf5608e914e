"""The exact planner has the least traffic, and least peaks are those of all orders."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from graph_cases import GraphBuilder, chain_step, machine, random_graph, request
from penstock.errors import InfeasibleError
from penstock.graph import Kind, StepGraph
from penstock.planner import Budget, check
from penstock.planner.bounds._fixed_order import tabulate_live_ranges
from penstock.planner.exact._addresses import first_fit
from penstock.planner.exact._exact import exact, start_orders
from penstock.planner.exact._exhaustive import Limit, _reuse_cases, _topological_orders, residencies
from penstock.planner.exact._groups import group_operators
from penstock.planner.exact._order_relaxation import OrderRelaxation
from penstock.planner.exact._peak import min_peak, min_working_set
from penstock.planner.exact._traffic_search import TrafficSearch
from walk import walked_traffic

HOST = 1 << 30


def alike(graph: StepGraph) -> StepGraph:
    """Where results take the place of operands, both have the same bytes."""
    operators = [
        dataclasses.replace(
            operator,
            may_overwrite=tuple(
                (read, created)
                for read, created in operator.may_overwrite
                if graph.num_bytes(read) == graph.num_bytes(created)
            ),
        )
        for operator in graph.operators
    ]
    return dataclasses.replace(graph, operators=tuple(operators))


def inference_graph(rng, num_operators) -> StepGraph:
    return alike(random_graph(rng, num_operators, persistent=False))


def training_graph(rng, num_operators) -> StepGraph:
    if rng.random() < 0.2:
        return chain_step(1, weight_bytes=rng.choice([2, 6]), in_place=rng.random() < 0.5)
    return alike(random_graph(rng, num_operators))


def peak_bytes(graph: StepGraph) -> int:
    """Of the program's order, if nothing leaves."""
    return (
        int(tabulate_live_ranges(graph, range(len(graph.operators))).live_bytes.max())
        + graph.workspace_bytes
    )


def least_traffic(graph: StepGraph, device_bytes: int) -> int | None:
    """The least bytes that move, over all orders and residencies."""
    budget, least = Budget(device_bytes=device_bytes, host_bytes=HOST), None

    def moves_less(transfers) -> bool:
        return least is None or moved_bytes(transfers) < least

    for order in _topological_orders(graph):
        for _, transfers, _ in residencies(graph, order, budget, Limit(), moves_less):
            least = moved_bytes(transfers)
    return least


def moved_bytes(transfers) -> int:
    return sum(transfer.num_bytes for transfer in transfers)


def assert_least_traffic(graph, device_bytes):
    """`exact` finds what trying everything finds, and proves it unless addresses need more."""
    budget = Budget(device_bytes=device_bytes, host_bytes=HOST)
    seconds = [1.0] * len(graph.operators)
    least = least_traffic(graph, device_bytes)
    if least is None:
        with pytest.raises(InfeasibleError):
            exact(request(graph, budget=budget, profile=machine(), seconds=seconds))
        return
    plan = exact(request(graph, budget=budget, profile=machine(), seconds=seconds))
    check(graph, plan)
    assert moved_bytes(plan.transfers) == plan.notes["non_compulsory_bytes"] == least
    assert plan.notes["lower_bound_bytes"] <= least
    anywhere = min(
        walked_traffic(graph, order, device_bytes) for order in _topological_orders(graph)
    )
    assert plan.notes["proved"] or anywhere < least
    assert plan.notes["lower_bound_bytes"] == least or not plan.notes["proved"]


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 1.0]))
@example(random.Random(237), 0.0)  # an operand's place is taken, and it comes back later
@example(random.Random(402), 0.0)  # it comes back at once, for the operator that changes it
@example(random.Random(416), 0.5)  # so that less has to move
def test_no_order_and_residency_moves_less(rng, share):
    graph = inference_graph(rng, rng.randint(1, 5))
    lowest, highest = min_working_set(graph), min_peak(graph).num_bytes
    device_bytes = round(lowest + share * (highest - lowest))
    assert_least_traffic(graph, device_bytes)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 1.0]))
@example(random.Random(100071), 0.0)  # what leaves earlier than it has to makes room for others
@example(random.Random(100312), 0.0)  # as does what would not have to leave at all
def test_no_order_and_residency_of_a_training_step_moves_less(rng, share):
    graph = training_graph(rng, rng.randint(1, 5))
    lowest, highest = min_working_set(graph), peak_bytes(graph)
    device_bytes = round(lowest + share * (highest - lowest))
    assert_least_traffic(graph, device_bytes)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.3, 0.6]), st.booleans())
def test_a_walk_through_all_states_finds_the_same(rng, share, training):
    """Bytes alone: whatever addresses there are is taken."""
    num_operators = rng.randint(1, 5)
    graph = training_graph(rng, num_operators) if training else inference_graph(rng, num_operators)
    lowest, highest = min_working_set(graph), peak_bytes(graph)
    device_bytes = round(lowest + share * (highest - lowest))
    least = min(
        (walked_traffic(graph, order, device_bytes) for order in _topological_orders(graph)),
        default=math.inf,
    )
    search = TrafficSearch(graph, device_bytes, reorder=True, time_limit=60.0)
    search.find_offsets = lambda order, intervals: first_fit(graph, order, intervals)
    best = search.run(start_orders(graph))
    assert best.proved
    assert (math.inf if best.packed is None else best.packed.traffic) == least
    frozen = TrafficSearch(graph, device_bytes, reorder=False, time_limit=60.0)
    frozen.find_offsets = search.find_offsets
    best = frozen.run(())
    assert best.proved
    program = walked_traffic(graph, tuple(range(len(graph.operators))), device_bytes)
    assert (math.inf if best.packed is None else best.packed.traffic) == program


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.3, 0.6]), st.booleans())
def test_the_floor_is_below_all_orders(rng, share, training):
    num_operators = rng.randint(1, 5)
    graph = training_graph(rng, num_operators) if training else inference_graph(rng, num_operators)
    lowest, highest = min_working_set(graph), peak_bytes(graph)
    device_bytes = round(lowest + share * (highest - lowest))
    sizes = [storage.num_bytes for storage in graph.storages]
    together = group_operators(graph)
    least = min(walked_traffic(graph, order, device_bytes) for order in _topological_orders(graph))
    capacity = device_bytes - graph.workspace_bytes
    freely = group_operators(graph, at_ends=False)
    for groups, is_ordered, at_ends in (
        (freely, False, False),
        (freely, True, False),
        (together, True, True),
    ):
        floor = OrderRelaxation(
            graph, sizes, capacity, groups, is_ordered=is_ordered, at_ends=at_ends
        ).solve(60.0)
        assert (math.inf if floor is None else floor) <= least
    kept = min(
        walked_traffic(graph, order, device_bytes)
        for order in _topological_orders(graph)
        if all(
            order[order.index(group[0]) :][: len(group)] == tuple(group)
            for group in together.groups
        )
    )
    assert kept == least


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_least_peak_is_that_of_the_best_order(rng):
    graph = inference_graph(rng, rng.randint(1, 6))
    workspace_bytes = max(operator.workspace_bytes for operator in graph.operators)
    peaks = {}
    for order in _topological_orders(graph):
        peaks[order] = min(int(case.live_bytes.max()) for case in _reuse_cases(graph, order))
    found = min_peak(graph)
    assert found.proved
    assert found.num_bytes - workspace_bytes == min(peaks.values()) == peaks[found.order]


def branches(num_branches, num_layers) -> StepGraph:
    """Chains from one input, of which each ends in a small value; they are added up."""
    build = GraphBuilder()
    x = build.storage(8, Kind.INPUT, given=True)
    ends = []
    for _ in range(num_branches):
        y = x
        for layer in range(num_layers):
            y, read = build.storage(1 if layer == num_layers - 1 else 16), y
            build.run(reads=(read,), creates=(y,))
        ends.append(y)
    result = build.storage(1)
    build.run(reads=tuple(ends), creates=(result,))
    return build.graph(result)


def test_branches_one_after_the_other_have_the_least_peak():
    graph = branches(6, 4)
    peak = min_peak(graph)
    assert peak.proved
    # Within the last branch but one: the input, the ends of four, and two of its own.
    assert peak.num_bytes == 8 + 4 + 16 + 16
    program_order = tuple(range(len(graph.operators)))
    assert sorted(peak.order) == list(program_order)


def test_a_search_that_ends_early_says_so():
    rng = random.Random(5)
    graph = inference_graph(rng, 14)
    peak, best = min_peak(graph, max_states=3), min_peak(graph)
    assert not peak.proved
    assert best.proved
    assert peak.num_bytes >= best.num_bytes


def test_no_more_programs_are_made_when_the_time_is_over(monkeypatch):
    graph = training_graph(random.Random(3), 5)
    orders = start_orders(graph)
    search = TrafficSearch(graph, peak_bytes(graph) - 1, reorder=True, time_limit=0.0)
    monkeypatch.setattr(search, "find_offsets", lambda *_: None)
    make, made = search._program, []
    monkeypatch.setattr(search, "_program", lambda *args: made.append(args) or make(*args))
    search.run(orders)
    assert len(made) <= len(orders)


def test_a_skip_connection_leaves_at_the_tightest_budget():
    build = GraphBuilder()
    x = build.storage(10, Kind.INPUT, given=True)
    skip = build.storage(10)
    build.run(reads=(x,), creates=(skip,))
    y = skip
    for _ in range(5):
        y, read = build.storage(20), y
        build.run(reads=(read,), creates=(y,))
    result = build.storage(10)
    build.run(reads=(y, skip), creates=(result,))
    graph = build.graph(result)
    assert (min_working_set(graph), min_peak(graph).num_bytes) == (40, 50)
    seconds = [1.0] * len(graph.operators)
    plan = exact(
        request(
            graph,
            budget=Budget(device_bytes=40, host_bytes=HOST),
            profile=machine(),
            seconds=seconds,
        )
    )
    check(graph, plan)
    assert plan.notes["non_compulsory_bytes"] == 20  # out once, back once
    assert plan.notes["proved"]
    plan = exact(
        request(
            graph,
            budget=Budget(device_bytes=50, host_bytes=HOST),
            profile=machine(),
            seconds=seconds,
        )
    )
    assert plan.notes["non_compulsory_bytes"] == 0


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="inference"):
        min_peak(chain_step(1))
    build = GraphBuilder()
    state = build.storage(4, Kind.BUFFER)
    build.run(reads=(state,), creates=(build.version(state),))
    with pytest.raises(ValueError, match="changed in place"):
        exact(
            request(
                build.graph(),
                budget=Budget(device_bytes=100, host_bytes=HOST),
                profile=machine(),
                seconds=[1.0],
            )
        )
    with pytest.raises(ValueError, match="device_bytes"):
        exact(request(branches(1, 1), budget=Budget(), profile=machine(), seconds=[1.0] * 2))


def test_a_budget_below_the_working_set_is_refused():
    graph = branches(2, 3)
    with pytest.raises(InfeasibleError) as raised:
        exact(
            request(
                graph,
                budget=Budget(device_bytes=31, host_bytes=HOST),
                profile=machine(),
                seconds=[1.0] * 7,
            )
        )
    assert raised.value.minimum_device_bytes == min_working_set(graph) == 32
    assert raised.value.operator == "op1"


@pytest.mark.parametrize(("device_bytes", "proved"), [(2049 + 1024 - 1, True), (3073, False)])
def test_only_what_no_alignment_fits_is_proved_not_to_fit(device_bytes, proved):
    build = GraphBuilder()
    operand, result = build.storage(2049, Kind.INPUT, given=True), build.storage(1024)
    build.run(reads=(operand,), creates=(result,))
    budget = Budget(device_bytes=device_bytes, host_bytes=HOST)
    asked = request(build.graph(result), budget=budget, seconds=[1.0])
    with pytest.raises(InfeasibleError, match="multiples of") as raised:
        exact(asked)
    assert raised.value.proved is proved
    assert raised.value.minimum_device_bytes == 2049 + 1024


def test_what_is_written_over_later_is_not_given_away_before():
    build = GraphBuilder()
    given = build.storage(5, Kind.INPUT, given=True)
    made = build.storage(5)
    changed = build.version(given)
    build.run(reads=(given,), creates=(made,), may_overwrite=((given, made),))
    build.run(mutates=((given, changed),))
    result = build.storage(4)
    build.run(reads=(changed,), creates=(result,))
    graph = build.graph(loss=result)
    plan = exact(
        request(
            graph,
            budget=Budget(device_bytes=10, host_bytes=HOST),
            profile=machine(),
            seconds=[1.0] * 3,
        )
    )
    check(graph, plan)
    assert not plan.transfers


def test_the_ends_of_a_step_choose_who_is_first_and_last():
    """An update that could wait for its gradient runs first, so that what is given may leave."""
    build = GraphBuilder()
    x = build.storage(4, Kind.INPUT, given=True)
    weight, state = build.storage(8, Kind.PARAMETER), build.storage(4, Kind.OPTIMIZER_STATE)
    decayed = build.version(state)
    build.run(mutates=((state, decayed),))
    y = build.storage(4)
    build.run(reads=(weight,), creates=(y,))
    build.run(reads=(x, y), mutates=((decayed, build.version(decayed)),))
    first = build.graph()
    build = GraphBuilder()  # one that could run at once runs last, so that the result may be away
    x = build.storage(8, Kind.INPUT, given=True)
    changed = build.version(x)
    build.run(mutates=((x, changed),))
    a, b = build.storage(6), build.storage(8)
    build.run(reads=(changed,), creates=(a, b), workspace_bytes=3)
    build.run(mutates=((a, build.version(a)),))
    after = build.version(changed)
    build.run(reads=(b,), mutates=((changed, after),))
    c, result = build.storage(8), build.storage(5)
    build.run(reads=(after,), creates=(c, result))
    build.run(reads=(b, after), mutates=((c, build.version(c)),))
    last = build.graph(result)
    for graph, device_bytes, operator in ((first, 12, 0), (last, 28, 2)):
        least = min(
            walked_traffic(graph, order, device_bytes) for order in _topological_orders(graph)
        )
        seconds = [1.0] * len(graph.operators)
        budget = Budget(device_bytes=device_bytes, host_bytes=HOST)
        plan = exact(request(graph, budget=budget, profile=machine(), seconds=seconds))
        check(graph, plan)
        assert plan.notes["non_compulsory_bytes"] == least
        assert plan.order[0 if operator == 0 else -1] == operator


def test_a_captured_step_moves_no_more_than_what_the_search_finds():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = penstock.capture(model, optimizer, torch.randn(16, 32), loss=lambda y, _: y.sum())
    options = {"host_memory": "1GiB", "machine": "h200"}
    peak = penstock.plan(graph, time_limit=1, **options).peak_device_bytes
    found = penstock.plan(graph, device_memory=peak * 3 // 4, method="exact", **options)
    check(graph, found)
    assert found.notes["proved"]
    assert found.notes["lower_bound_bytes"] == sum(found.bytes_moved.values()) > 0
    assert all(placement.offset % 64 == 0 for placement in found.placements)
    other = penstock.plan(
        graph, device_memory=peak * 3 // 4, recompute=False, time_limit=2, **options
    )
    assert sum(other.bytes_moved.values()) >= sum(found.bytes_moved.values())
