"""`plan`: budgets as users write them, machines by name, and errors that name the argument."""

import dataclasses

import pytest

from graphs import chain_step
from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner import check, plan

MIB = 2**20


def timed_chain(num_layers=8):
    graph = chain_step(num_layers, weight_bytes=MIB, activation_bytes=4 * MIB)
    return with_seconds(graph, 1e-3)


def with_seconds(graph, seconds):
    operators = tuple(dataclasses.replace(o, seconds=seconds) for o in graph.operators)
    return dataclasses.replace(graph, operators=operators)


def test_without_a_budget_nothing_moves_and_the_step_is_ideal():
    graph = timed_chain()
    found = plan(graph, machine="h200", time_limit=5)
    check(graph, found)
    assert not found.transfers
    assert found.step_seconds == pytest.approx(found.ideal_seconds)
    assert found.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["auto", "genetic"])
def test_a_budget_is_kept(method):
    graph = timed_chain()
    roomy = plan(graph, machine="h200", time_limit=5)
    budget = roomy.peak_device_bytes * 3 // 4
    found = plan(
        graph, device_memory=budget, machine="v100-16gb-pcie3", method=method, time_limit=2
    )
    check(graph, found)
    assert found.peak_device_bytes <= budget
    assert found.lower_bound_seconds <= found.step_seconds * (1 + 1e-9)
    assert found.ideal_seconds == pytest.approx(len(graph.operators) * 1e-3)


def test_a_store_takes_what_leaves_where_there_is_no_host_tier(tmp_path):
    graph = timed_chain()
    roomy = plan(graph, machine="h200", time_limit=5)
    found = plan(
        graph,
        device_memory=roomy.peak_device_bytes * 2 // 3,
        store=str(tmp_path),
        machine="v100-16gb-pcie3",
        recompute=False,
        time_limit=2,
    )
    check(graph, found)
    assert set(found.bytes_moved) == {Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE}
    assert found.peak_file_bytes > 0 and found.peak_host_bytes == 0


def test_sizes_are_strings_too_and_a_tiny_budget_says_what_would_do():
    with pytest.raises(InfeasibleError) as raised:
        plan(timed_chain(), device_memory="1MiB", machine="h200", time_limit=2)
    needed = raised.value.minimum_device_bytes
    assert needed is not None and raised.value.operator is not None
    graph = timed_chain()
    check(graph, plan(graph, device_memory=needed, machine="h200", time_limit=2))


def test_too_little_room_below_is_said():
    graph = timed_chain()
    peak = plan(graph, machine="h200", time_limit=5).peak_device_bytes
    with pytest.raises(InfeasibleError, match="host_memory"):
        plan(
            graph,
            device_memory=peak // 2,
            host_memory="1KiB",
            machine="h200",
            recompute=False,
            time_limit=2,
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"machine": "gpu9000"}, ValueError, "gpu9000"),
        ({"method": "magic"}, ValueError, "method='magic'"),
        ({"time_limit": 0}, ValueError, "time_limit=0"),
        ({"time_limit": float("nan")}, ValueError, "time_limit"),
        ({"device_memory": "much"}, ValueError, "device_memory"),
        ({"host_memory": -1}, ValueError, "host_memory"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        plan(timed_chain(2), **{"machine": "h200", **options})


def test_something_else_than_a_graph_is_refused():
    with pytest.raises(TypeError, match="StepGraph"):
        plan("model")  # pyright: ignore[reportArgumentType]
