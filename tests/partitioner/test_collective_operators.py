"""Operators that are written out for ranks: a split step is the step of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from _ranks import needs_gloo

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import torch
from torch import nn

import _lockstep
import penstock
from _rank_cases import make as make_network
from _rank_cases import make_optimizer, square
from penstock.graph.bindings import bind_batch, bind_group_tensors, bind_numbers, find_entries
from penstock.graph.fsdp.shards import ShardedModel
from penstock.partitioner import Partition, partition

pytestmark = needs_gloo
TOLERANCE = 1e-6  # sums of at most a hundred numbers of about 1, in another order


class Calculation(nn.Module):
    """A function of its layer and the input."""

    def __init__(self, function: Callable[[nn.Module, Any], Any], layer: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x)


def run_split(
    model: nn.Module,
    batch: torch.Tensor,
    method: str,
    num_ranks: int,
    make: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    memory: str | None = None,
) -> tuple[Partition, dict[str, float]]:
    """Run a step on ranks; return its partition, and what differs from the whole step by name."""
    optimizer = make(model)
    graph = penstock.capture(model, optimizer, batch, loss=square)
    options = {"machine": "h100-80gb", "method": method, "time_limit": 2, "device_memory": memory}
    found = partition(graph, devices=num_ranks, **options)
    entries = find_entries(graph, model, square, optimizer, ShardedModel(model))
    tensors = bind_batch(graph, batch) | {each.name: each.take(graph) for each in entries}
    tensors |= bind_group_tensors(graph, optimizer)
    numbers = bind_numbers(graph, optimizer)
    _, losses, errors = _lockstep.run_ranks(graph, found, tensors, numbers)
    assert len({each.item() for each in losses}) == 1
    return found, {
        name: each.abs().max().item()
        for errors_of_rank in errors
        for name, each in errors_of_rank.items()
        if each.numel() and each.abs().max() > TOLERANCE
    }


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


@pytest.mark.parametrize("method", ["batch", "fsdp", "auto"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_lists_of_parameters(name: str, method: str):
    model, batch, _ = make_network("mlp")
    _, wrong = run_split(model, batch, method, 2, OPTIMIZERS[name])
    assert wrong == {}


def test_parts_of_one_storage_that_are_only_read_are_not_written_back():
    torch.manual_seed(0)
    gru = nn.GRU(8, 16, batch_first=True)
    model = Calculation(lambda layer, x: layer(x)[0], gru)
    _, wrong = run_split(model, torch.randn(4, 3, 8), "chop", 3)
    assert wrong == {}


def make_norm(kind: str, dtype: torch.dtype, dtype_of_norm: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, affine=kind != "plain", track_running_stats=kind != "untracked")
    if kind != "plain":
        nn.init.normal_(norm.weight)
    layers = nn.Linear(8, 16).to(dtype), norm.to(dtype_of_norm), nn.Tanh()
    return nn.Sequential(*layers)


@pytest.mark.parametrize("kind", ["affine", "plain", "untracked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norms_are_those_of_the_whole_batch(dtype: torch.dtype, kind: str):
    batch = torch.randn(12, 8, dtype=dtype)
    found, wrong = run_split(make_norm(kind, dtype, dtype), batch, "batch", 2)
    assert wrong == {} and {"n"} in map(set, found.splits)


@pytest.mark.parametrize("dtype_of_norm", [torch.float32, torch.bfloat16])
def test_batch_norms_of_16_bits_have_sums_of_32(dtype_of_norm: torch.dtype):
    model = make_norm("affine", torch.bfloat16, dtype_of_norm)
    batch = torch.randn(48, 8).bfloat16()
    found, wrong = run_split(model, batch, "batch", 3)
    assert {"n"} in map(set, found.splits)
    assert all(num < 0.01 for num in wrong.values()), wrong  # numbers of 8 bits


@pytest.mark.parametrize("method", ["tensor", "auto"])
def test_batch_norms_of_volumes(method: str):
    torch.manual_seed(0)
    norm = nn.BatchNorm3d(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), norm, nn.ReLU())
    _, wrong = run_split(model, torch.randn(4, 2, 4, 4, 4), method, 2)
    assert wrong == {}


class Words(nn.Module):
    """Embeddings whose gradients are divided by the counts of their words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, scale_grad_by_freq=True)
        self.layer = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(tokens))


@pytest.mark.parametrize("method", ["batch", "tensor", "greedy", "auto"])
def test_gradients_are_scaled_by_the_frequencies_of_all_words(method: str):
    torch.manual_seed(0)
    _, wrong = run_split(Words(), torch.arange(24).view(4, 6) % 3, method, 2)
    assert wrong == {}


@pytest.mark.parametrize("method", ["batch", "auto"])
def test_random_numbers_by_a_tensor_of_probabilities(method: str):
    torch.manual_seed(0)

    def draw(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        certain = (layer(x) > 0).float()  # threads of one process share the generator
        return layer(x) * torch.empty_like(x).bernoulli_(certain)

    _, wrong = run_split(Calculation(draw, nn.Linear(8, 8)), torch.randn(12, 8), method, 2)
    assert wrong == {}


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_splits_that_ranks_cannot_run_are_not_chosen(memory: str | None):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
    # Of one image the cheapest split is one by rows, whose halos are not exchanged.
    _, wrong = run_split(
        nn.Sequential(*layers), torch.randn(1, 3, 24, 24), "auto", 2, memory=memory
    )
    assert wrong == {}
