"""Planned steps of ranks: splitting and offloading together train where neither alone does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from _ranks import NUM_RANKS, needs_gloo, spawn

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import penstock
from penstock.errors import CaptureError, InfeasibleError, PenstockError
from penstock.graph import StepGraph
from penstock.memory import machine
from penstock.partitioner import Partition, check, partition
from penstock.partitioner._api import assemble
from penstock.partitioner._elimination import Elimination
from penstock.partitioner._fold import find_groups
from penstock.partitioner._level import make_level
from penstock.partitioner._mesh import make_mesh
from penstock.partitioner._search import SplitSearch
from penstock.partitioner._split import Model
from penstock.partitioner.axes import find_axes

WIDTH, NUM_LAYERS, NUM_STEPS = 64, 4, 4
BUDGET = 56 * 2**10
MACHINE = machine("h200")
POWER = [2]  # of the loss, a Python number of the program
TOLERANCE = 1e-6  # relative, of float32 sums of 64 numbers in another order


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(WIDTH, WIDTH)


def square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.pow(POWER[0]).mean()


def capture() -> StepGraph:
    model, optimizer, batch = make()
    return penstock.capture(model, optimizer, batch, loss=square)


def split_no_sums(graph: StepGraph) -> Partition:
    """A partition in which no product adds up over ranks."""
    axes = find_axes(graph)
    model = Model(graph, axes, find_groups(graph, axes))
    level = make_level(model, make_mesh((NUM_RANKS,), MACHINE), None, {})
    choices = level.choices
    unwanted = [np.zeros(num) for num in choices.num_options]
    for group, options in enumerate(level.operators):
        member = model.groups.operators[group][0]
        sums = set().union(*(use.sums for use in axes.operators[member].outputs))
        if graph.operators[member].target != "aten.mean.default":  # the loss, read by nobody
            for option, split in enumerate(options):
                unwanted[len(level.storages) + group][option] = 1e24 * (split[0] in sums)
    start = np.zeros(len(choices.num_options), dtype=int)
    _, found = Elimination(choices).solve(1.0, start, unwanted)
    search = SplitSearch(model, MACHINE, None)
    made = assemble(search, search.add(level.step_split(found), "no sums"), 0)
    check(graph, made)
    return made


def train(step: Any, batch: torch.Tensor) -> list[float]:
    return [step(batch).item() for _ in range(NUM_STEPS)]


def train_ranks(partitions: list[Partition], folder: Path) -> list[dict[str, Any]]:
    distributed.init_process_group("gloo")
    return [train_rank(each, folder) for each in partitions]


def train_rank(found: Partition, folder: Path) -> dict[str, Any]:
    model, optimizer, batch = make()
    with penstock.fit(
        model,
        optimizer,
        batch,
        loss=square,
        device_memory=BUDGET,
        store=folder,
        machine=MACHINE,
        time_limit=0.25,
        cache=False,
        debug=True,
        partition=found,
    ) as step:
        losses = train(step, batch)
        POWER[0] = 3
        with pytest.raises(CaptureError, match="is 3 and was 2"):
            step(batch)
        POWER[0] = 2
        with pytest.raises(PenstockError, match="several devices"):
            step.add(batch[:2])
        report = step.report()
    state = {key: each.full_tensor() for key, each in model.state_dict().items()}  # pyright: ignore
    return {
        "losses": losses,
        "state": state,
        "held": report.arena_bytes + report.workspace_bytes,
        "moved": report.moved_bytes,
    }


@needs_gloo
def test_splitting_and_offloading_train_together_where_neither_does(tmp_path: Path):
    graph = capture()
    with pytest.raises(InfeasibleError) as whole:
        penstock.plan(graph, device_memory=BUDGET, store=tmp_path, machine=MACHINE, time_limit=0.25)
    with pytest.raises(InfeasibleError) as split:
        partition(graph, devices=NUM_RANKS, device_memory=BUDGET, machine=MACHINE)
    assert whole.value.proved
    assert split.value.proved
    partitions = [
        split_no_sums(graph),
        partition(graph, devices=NUM_RANKS, machine=MACHINE, method="fsdp"),
    ]
    model, optimizer, batch = make()
    with penstock.fit(
        model, optimizer, batch, loss=square, device_memory="1GiB", machine=MACHINE, cache=False
    ) as step:
        losses = train(step, batch)
    expected = model.state_dict()
    work = functools.partial(train_ranks, partitions)
    for found in spawn(work, NUM_RANKS, tmp_path):
        for each in found:
            assert each["held"] <= BUDGET
            assert min(each["moved"].values()) > 0
            assert each["losses"] == pytest.approx(losses, rel=TOLERANCE)
            for key, tensor in expected.items():
                assert torch.allclose(each["state"][key], tensor, rtol=TOLERANCE, atol=TOLERANCE)
        assert all(torch.equal(found[0]["state"][key], each) for key, each in expected.items())
