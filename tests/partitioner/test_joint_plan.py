"""Splitting, offloading and recomputing, priced together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import LinkProfile, MachineProfile, machine
from penstock.partitioner import JointPlan, check, partition
from penstock.planner import check as check_plan

MACHINE = machine("h200")
ENOUGH = "1MiB"


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(64, 64)
    return penstock.capture(model, optimizer, batch, loss=lambda out, _: out.square().mean())


def with_peer(bytes_per_second: float) -> MachineProfile:
    """The machine with links of some rate between devices."""
    link = LinkProfile(bytes_per_second, (bytes_per_second,) * 2, 0)
    return dataclasses.replace(MACHINE, peer=link)


def plan(graph: StepGraph, device_memory: int | str, profile: MachineProfile) -> JointPlan:
    found = penstock.plan(
        graph,
        devices=2,
        device_memory=device_memory,
        host_memory=ENOUGH,
        machine=profile,
        time_limit=4.0,
    )
    check(graph, found.partition)
    check_plan(found.graph, found.plan)
    assert found.plan.budget.device_bytes is not None
    assert found.plan.peak_device_bytes <= found.plan.budget.device_bytes
    return found


def test_where_splitting_alone_does_not_fit_ranks_offload(graph: StepGraph):
    budget = 56 * 2**10
    with pytest.raises(InfeasibleError):
        partition(graph, devices=2, device_memory=budget, machine=MACHINE)
    found = plan(graph, budget, MACHINE)
    assert sum(found.plan.bytes_moved.values()) > 0
    assert found.saved_seconds is None
    assert "does not fit" in str(found)


def test_offloading_is_cheaper_where_links_between_devices_are_slow(graph: StepGraph):
    tightest = partition(graph, devices=2, machine=MACHINE, method="fsdp").peak_device_bytes
    slow = plan(graph, tightest, with_peer(1e7))
    assert slow.saved_seconds is not None
    assert slow.saved_seconds > 0
    assert "cheaper than splitting further" in str(slow)
    assert slow.partition.peak_device_bytes > tightest
    assert slow.step_seconds == min(each.step_seconds or 1.0 for each in slow.choices)


def test_splitting_alone_is_taken_where_memory_is_in_plenty(graph: StepGraph):
    found = plan(graph, ENOUGH, MACHINE)
    assert found.saved_seconds == 0
    assert "splitting alone is cheapest" in str(found)
    assert found.plan.bytes_moved == {}


def test_what_fits_in_no_way_is_refused(graph: StepGraph):
    with pytest.raises(InfeasibleError, match="partitions over 2 devices"):
        plan(graph, 2**10, MACHINE)
    with pytest.raises(ValueError, match="devices"):
        penstock.plan(graph, devices=1, machine=MACHINE)


def test_one_device_has_an_ordinary_plan(graph: StepGraph):
    found = penstock.plan(graph, device_memory=ENOUGH, machine=MACHINE, time_limit=0.5)
    assert isinstance(found, penstock.Plan)
