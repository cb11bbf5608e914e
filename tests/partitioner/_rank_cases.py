"""Models that ranks train by a partition, and the comparison with one process that trains alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import _zoo
import penstock
from _steps import eager_step
from penstock.errors import GraphFileError, RankError
from penstock.graph import StepGraph
from penstock.graph.fsdp.shards import local_of
from penstock.memory import machine
from penstock.partitioner import Partition, apply, check, partition

NUM_STEPS = 5
NAMES = {
    "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}
"""Of collectives, in torch's words."""


class Words(nn.Module):
    """A transformer block between an embedding and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=dropout)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.words(tokens)))


class Cell(nn.Module):
    """A recurrent cell over three time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden = steps.new_zeros(steps.shape[1], 8)
        state = hidden.clone()
        for each in steps:
            hidden, state = self.cell(each, (hidden, state))
        return self.head(hidden)


def square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def next_words(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    targets = batch.clone()
    targets[0, :2] = -100  # not all ranks have as many
    return functional.cross_entropy(output.view(-1, 16), targets.view(-1))


def make(name: str) -> tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor] | None]:
    """A model, its batch and its loss."""
    torch.manual_seed(0)
    if name in _zoo.CASES:
        case = _zoo.CASES[name]
        return case.make(), case.batch, case.loss
    if name == "columns":
        # Kernels of products add up a row of 64 alike, whether there are 64 columns or 32.
        return nn.Linear(64, 64), torch.randn(64, 64), square
    if name == "mlp":
        layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        return nn.Sequential(*layers), torch.randn(12, 8), square
    if name == "cnn":
        layers = (
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        )
        return nn.Sequential(*layers), torch.randn(4, 3, 8, 8), square
    if name == "cell":
        return Cell(), torch.randn(3, 4, 8), square
    words = Words(dropout=0.1 if name == "dropout" else 0.0)
    return words, torch.randint(16, (4, 6)), next_words


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def train_alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the state of a process that trains alone."""
    model, batch, loss = make(name)
    optimizer, losses = make_optimizer(model), []
    torch.manual_seed(5)
    for _ in range(NUM_STEPS):
        losses.append(eager_step(model, optimizer, _zoo.Case(lambda: model, batch, loss)).item())
    return losses, copy.deepcopy(model.state_dict())


class Case(NamedTuple):
    """A step and its partition, as ranks are given them."""

    name: str
    method: str
    graph: StepGraph
    partition: Partition


@functools.cache
def capture_step(name: str) -> StepGraph:
    """A model's step, which fits each model that `make` gives by that name."""
    model, batch, loss = make(name)
    graph = penstock.capture(model, make_optimizer(model), batch, loss=loss)
    return dataclasses.replace(graph, captured=None)


def make_case(name: str, method: str, num_ranks: int) -> Case:
    """A model's step, split in some way."""
    graph = capture_step(name)
    found = partition(graph, devices=num_ranks, machine=machine("h100-80gb"), method=method)
    check(graph, found)
    return Case(name, method, graph, found)


def train_together(case: Case) -> dict[str, Any]:
    """What a rank sees of a partitioned training."""
    name, _, graph, found = case
    model, batch, _ = make(name)
    optimizer = make_optimizer(model)
    if distributed.get_rank():
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()  # what rank 0 has counts
    mesh = init_device_mesh("cpu", found.mesh)
    step = apply(found, model, mesh, graph=graph, optimizer=optimizer)
    torch.manual_seed(5)
    losses = [step(batch).item() for _ in range(NUM_STEPS - 1)]
    with CommDebugMode() as counted:
        losses.append(step(batch).item())
    counts = {str(name).rpartition(".")[2]: num for name, num in counted.get_comm_counts().items()}
    kinds = {NAMES[kind]: num for kind, (num, _) in found.count_collectives().items()}
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    shards = [each.placements[0].is_shard() for each in model.parameters()]  # pyright: ignore
    model.eval()
    try:
        step(batch)
        changed = ""
    except GraphFileError as error:
        changed = str(error)
    return {
        "losses": losses,
        "changed": changed,
        "state": state,
        "collectives": (kinds, counts),
        "bytes": (found.exchanged_bytes, step.exchanged_bytes),
        "peaks": (found.peak_device_bytes, step.peak_device_bytes),
        "splits": sum(shards),
    }


def make_adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def make_adam_case() -> Case:
    """A step whose optimizer counts its steps."""
    model, batch, loss = make("cnn")
    graph = penstock.capture(model, make_adam(model, 0.1), batch, loss=loss)
    graph = dataclasses.replace(graph, captured=None)
    found = partition(graph, devices=2, machine=machine("h100-80gb"), method="batch")
    return Case("cnn", "batch", graph, found)


def train_unlike_ranks(case: Case | None) -> dict[str, Any]:
    """Train on ranks of which rank 0 alone has state, or alone; two of three steps are ordinary."""
    model, batch, loss = make("cnn")
    is_first = case is None or not distributed.get_rank()
    optimizer = make_adam(model, 0.1 if is_first else 0.01)
    alone = _zoo.Case(lambda: model, batch, loss)
    step = functools.partial(eager_step, model, optimizer, alone)
    for _ in range(2 * is_first):
        step()
    refused = ""
    if case is not None:
        mesh = init_device_mesh("cpu", case.partition.mesh)
        constants = case.graph.metadata["hyper_parameters"] | {"a number": distributed.get_rank()}
        unlike = {**case.graph.metadata, "hyper_parameters": constants}
        for graph in (dataclasses.replace(case.graph, metadata=unlike), case.graph):
            try:
                made = apply(case.partition, model, mesh, graph=graph, optimizer=optimizer)
            except GraphFileError as error:
                refused = str(error)
            else:
                step = functools.partial(made, batch)
    loss = step().item()
    counts = [state["step"].item() for state in optimizer.state.values()]
    counts += [each.item() for each in model.buffers() if not each.dim()]
    return {"seen": [loss, optimizer.param_groups[0]["lr"], *counts], "refused": refused}


def refuse_mesh(case: Case) -> str:
    """The error of a mesh with other levels."""
    model, _, _ = make(case.name)
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()))
    try:
        apply(case.partition, model, mesh, graph=case.graph, optimizer=make_optimizer(model))
    except ValueError as error:
        return str(error)
    return ""


def survive(case: Case, planned: bool, folder: Path) -> str:
    """The error of a rank whose partner is killed after its first step, if nothing is lost."""
    distributed.init_process_group("gloo")
    model, batch, loss = make(case.name)
    optimizer = make_optimizer(model)
    if planned:
        options = {"machine": "h200", "time_limit": 0.5, "cache": False, "device_memory": "1GiB"}
        step = penstock.fit(model, optimizer, batch, loss=loss, partition=case.partition, **options)
    else:
        mesh = init_device_mesh("cpu", case.partition.mesh)
        step = apply(case.partition, model, mesh, graph=case.graph, optimizer=optimizer)
    step(batch)
    if distributed.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    before = [local_of(each).clone() for each in model.parameters()]
    try:
        step(batch)
    except RankError as error:
        after = [local_of(each) for each in model.parameters()]
        assert all(map(torch.equal, before, after)) or not planned
        return str(error)
    return ""


class Saved(NamedTuple):
    """A case whose state is saved by some ranks after `NUM_SAVED` steps."""

    case: Case
    path: str


NUM_SAVED = 3


def save_checkpoint(saved: Saved) -> None:
    """Train the first steps, and save."""
    model, batch, _ = make(saved.case.name)
    _, _, graph, found = saved.case
    mesh = init_device_mesh("cpu", found.mesh)
    step = apply(found, model, mesh, graph=graph, optimizer=make_optimizer(model))
    for _ in range(NUM_SAVED):
        step(batch)
    checkpoint.save({"step": step}, checkpoint_id=saved.path)


def resume(saved: Saved) -> dict[str, Any]:
    """Load what other ranks have saved, and train the rest."""
    model, batch, _ = make(saved.case.name)
    _, _, graph, found = saved.case
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    mesh = init_device_mesh("cpu", found.mesh)
    step = apply(found, model, mesh, graph=graph, optimizer=make_optimizer(model))
    checkpoint.load({"step": step}, checkpoint_id=saved.path)
    losses = [step(batch).item() for _ in range(NUM_STEPS - NUM_SAVED)]
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    peaks = found.peak_device_bytes, step.peak_device_bytes
    return {"losses": losses, "state": state, "peaks": peaks}


def resume_cases(cases: list[Saved], folder: Path) -> list[dict[str, Any]]:
    """Resume each case on the ranks of this process's group."""
    distributed.init_process_group("gloo")
    return [*map(resume, cases)]


def run_cases(cases: list[Case], saved: list[Saved], adam: Case, folder: Path) -> list[Any]:
    """Train each case on the ranks of this process's group; save the state of some."""
    distributed.init_process_group("gloo")
    for each in saved:
        save_checkpoint(each)
    return [*map(train_together, cases), train_unlike_ranks(adam), refuse_mesh(cases[0])]
