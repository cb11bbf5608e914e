"""`plan`: budgets as users write them, machines by name, and errors that name the argument."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from graph_cases import chain_step
from penstock.errors import GraphFileError, InfeasibleError, PenstockError, PlanError
from penstock.graph import capture
from penstock.memory import Link
from penstock.planner import Plan, _api, check, plan, simulate
from penstock.planner.paging import peak_of_program_order

MIB = 2**20


def timed_chain(num_layers=8):
    graph = chain_step(num_layers, weight_bytes=MIB, activation_bytes=4 * MIB)
    return with_seconds(graph, 1e-3)


def with_seconds(graph, seconds):
    operators = tuple(dataclasses.replace(o, seconds=seconds) for o in graph.operators)
    return dataclasses.replace(graph, operators=operators)


def test_without_a_budget_nothing_moves_and_the_step_is_ideal():
    graph = timed_chain()
    found = plan(graph, machine="h200", time_limit=0.5)
    check(graph, found)
    assert not found.transfers
    assert found.step_seconds == pytest.approx(found.ideal_seconds)
    assert found.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["auto", "genetic"])
def test_a_budget_is_kept(method):
    graph = timed_chain()
    roomy = plan(graph, machine="h200", time_limit=0.5)
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
    roomy = plan(graph, machine="h200", time_limit=0.5)
    found = plan(
        graph,
        device_memory=roomy.peak_device_bytes * 2 // 3,
        store=str(tmp_path),
        machine="v100-16gb-pcie3",
        recompute=False,
        time_limit=0.5,
    )
    check(graph, found)
    assert set(found.bytes_moved) == {Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE}
    assert found.peak_file_bytes > 0 and found.peak_host_bytes == 0


def test_sizes_are_strings_too_and_a_tiny_budget_says_what_would_do():
    with pytest.raises(InfeasibleError) as raised:
        plan(timed_chain(), device_memory="1MiB", machine="h200", time_limit=0.5)
    needed = raised.value.minimum_device_bytes
    assert needed is not None and raised.value.operator is not None
    graph = timed_chain()
    check(graph, plan(graph, device_memory=needed, machine="h200", time_limit=0.5))


def test_too_little_room_below_is_said():
    graph = timed_chain()
    peak = plan(graph, machine="h200", time_limit=0.5).peak_device_bytes
    with pytest.raises(InfeasibleError, match="host_memory"):
        plan(
            graph,
            device_memory=peak // 2,
            host_memory="1KiB",
            machine="h200",
            recompute=False,
            time_limit=0.5,
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"machine": "gpu9000"}, ValueError, "gpu9000"),
        ({"method": "magic"}, ValueError, "method='magic'"),
        ({"time_limit": 0}, ValueError, "time_limit=0"),
        ({"time_limit": float("nan")}, ValueError, "time_limit"),
        ({"time_limit": True}, ValueError, "time_limit=True"),
        ({"reorder": "no"}, TypeError, "reorder='no'"),
        ({"recompute": None}, TypeError, "recompute=None"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 1.5}, TypeError, "seed is 1.5"),
        ({"seed": "a"}, TypeError, "seed is 'a'"),
        ({"seed": None}, TypeError, "seed is None"),
        ({"seed": True}, TypeError, "seed is True"),
        ({"machine": 5}, TypeError, "machine=5"),
        ({"progress": 5}, TypeError, "progress=5"),
        ({"device_memory": "much"}, ValueError, "device_memory"),
        ({"device_memory": "1/0"}, ValueError, "device_memory"),
        ({"device_memory": "0/5"}, ValueError, "device_memory"),
        ({"host_memory": -1}, ValueError, "host_memory"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        plan(timed_chain(2), **{"machine": "h200", **options})


def test_numbers_may_be_those_of_numpy():
    graph, limit = timed_chain(2), np.float32(0.5)
    found = plan(graph, machine="h200", seed=np.int64(3), time_limit=limit)  # pyright: ignore
    assert type(found.seed) is int and found.seed == 3
    check(graph, found)


@pytest.mark.parametrize("share", ["3/4", "75%"])
def test_a_share_of_the_programs_peak_is_a_budget(share):
    graph = timed_chain()
    found = plan(graph, device_memory=share, machine="v100-16gb-pcie3", time_limit=0.5)
    check(graph, found)
    budget = peak_of_program_order(graph) * 3 // 4
    assert found.budget.device_bytes == budget
    assert found.peak_device_bytes <= budget


def test_no_gap_is_negative():
    graph = timed_chain(2)
    found = plan(graph, machine="h200", time_limit=0.5)
    nearly = dataclasses.replace(found, step_seconds=found.bound.seconds * (1 - 1e-15))
    assert nearly.gap == 0.0


def test_something_else_than_a_graph_is_refused():
    with pytest.raises(TypeError, match="StepGraph"):
        plan("model")  # pyright: ignore[reportArgumentType]


def classifier_step(num_rows=256, width=4000):
    """A layer that makes logits, and their cross-entropy: 4 MB each time."""
    layer = torch.nn.Linear(8, width, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    batch = {"input": torch.zeros(num_rows, 8)}
    labels = torch.zeros(num_rows, dtype=torch.long)

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, labels)

    return capture(layer, optimizer, batch, loss=loss)


LOGITS = 256 * 4000 * 4


@pytest.mark.parametrize("method", ["auto", "genetic"])
def test_operators_that_need_too_much_are_planned_in_parts(method):
    graph = classifier_step()
    found = plan(
        graph, device_memory=int(1.4 * LOGITS), machine="h200", method=method, time_limit=3
    )
    check(graph, found)
    assert found.split_bytes is not None
    assert found.peak_device_bytes <= 1.4 * LOGITS
    parts = found.planned_graph(graph)
    assert parts is found.planned_graph(graph)
    assert len(parts.operators) == len(found.operator_seconds) > len(graph.operators)
    assert len(simulate(graph, found).positions) == len(found.order)
    again = Plan.from_dict(json.loads(json.dumps(found.to_dict())), graph=graph)
    assert again == found
    check(graph, again)


def test_parts_of_captured_steps_have_aligned_addresses_however_small_they_are():
    layer = torch.nn.Linear(8, 4).half()
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    classes = torch.zeros(6, dtype=torch.long)

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output.float(), classes)

    graph = capture(layer, optimizer, torch.zeros(6, 8).half(), loss=loss)
    found = plan(graph, device_memory="1/2", machine="v100-16gb-pcie3", time_limit=0.05)
    assert found.split_bytes is not None
    assert {each.offset % 64 for each in found.placements if each.num_bytes} == {0}


def test_what_would_do_counts_the_parts():
    graph = classifier_step()
    with pytest.raises(InfeasibleError) as raised:
        plan(graph, device_memory="1MiB", machine="h200", time_limit=0.5)
    needed = raised.value.minimum_device_bytes
    assert needed is not None and LOGITS < needed < 1.4 * LOGITS
    found = plan(graph, device_memory=needed, machine="h200", time_limit=0.5)
    check(graph, found)
    assert found.split_bytes is not None


def test_enough_memory_splits_nothing():
    graph = classifier_step()
    found = plan(graph, device_memory="1GiB", machine="h200", time_limit=0.5)
    assert found.split_bytes is None and found.planned_graph(graph) is graph
    with pytest.raises(GraphFileError, match="not for"):
        found.planned_graph(classifier_step(width=4001))


def test_a_split_plan_is_for_its_graph_alone():
    graph = classifier_step()
    found = plan(graph, device_memory=int(1.4 * LOGITS), machine="h200", time_limit=0.5)
    other = classifier_step(width=4001)
    with pytest.raises(GraphFileError, match="not for"):
        found.planned_graph(other)
    with pytest.raises(GraphFileError, match="plan again"):
        dataclasses.replace(found, operator_seconds=found.operator_seconds[:-1]).planned_graph(
            graph
        )
    for other_split in (None, 1 << 40):
        with pytest.raises(PlanError) as raised:
            check(graph, dataclasses.replace(found, split_bytes=other_split))
        assert raised.value.rule == "operators"


def inference_step(num_layers=6):
    graph = chain_step(num_layers, weight_bytes=MIB, activation_bytes=4 * MIB)
    storages = tuple(
        dataclasses.replace(s, num_bytes=0) if s.persistent else s for s in graph.storages
    )
    return with_seconds(dataclasses.replace(graph, storages=storages), 1e-3)


@pytest.mark.parametrize("below", ["host", "file"])
def test_exact_plans_move_the_least(below, tmp_path):
    graph = inference_step(4)
    budget = 4 * 4 * MIB + 1024  # the loss stays, and is one byte
    options = {"store": str(tmp_path)} if below == "file" else {}
    found = plan(
        graph, device_memory=budget, machine="h200", method="exact", time_limit=20, **options
    )
    check(graph, found)
    assert found.method == "exact"
    assert found.notes["proved"]
    moved = sum(found.bytes_moved.values())
    assert moved == found.notes["non_compulsory_bytes"] > 0
    roomy = plan(graph, device_memory="1GiB", machine="h200", method="exact")
    assert not roomy.transfers


def test_exact_plans_training_steps():
    graph = timed_chain(2)
    peak = plan(graph, machine="h200", time_limit=0.5).peak_device_bytes
    found = plan(graph, device_memory=peak * 3 // 4, machine="h200", method="exact", time_limit=20)
    check(graph, found)
    assert found.notes["proved"]
    assert sum(found.bytes_moved.values()) == found.notes["non_compulsory_bytes"] > 0


@pytest.mark.parametrize(
    ("graph", "options", "message"),
    [
        (inference_step(), {}, "device_memory="),
        (inference_step(80), {"device_memory": "1GiB"}, "at most 200 operators"),
    ],
)
def test_what_exact_cannot_plan_is_said(graph, options, message):
    with pytest.raises(ValueError, match=message):
        plan(graph, machine="h200", method="exact", **options)


def test_brute_force_is_no_method():
    with pytest.raises(ValueError, match="method='brute_force'"):
        plan(inference_step(1), machine="h200", method="brute_force")


def test_too_little_memory_for_planning_is_said(monkeypatch):
    def bound(*_):
        return np.ones(2**62, np.uint8)

    monkeypatch.setattr(_api, "_bound", bound)
    graph = timed_chain(3)
    with pytest.raises(PenstockError, match=r"planning \d+ operators .*plan\.save"):
        plan(graph, device_memory="1MiB", machine="h200", time_limit=0.1)
