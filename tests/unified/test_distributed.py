"""DistributedDataParallel over gloo: two processes read, and train, one table in shared memory."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _ranks import spawn
from penstock.unified import UnifiedTensor, unify
from penstock.unified.optim import Adam

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

NUM_RANKS, NUM_STEPS, NUM_ROWS, BATCH = 2, 6, 500, 32


class Scores(nn.Module):
    """Scores rows by their features and by an embedding that is trained with it."""

    def __init__(self, features: UnifiedTensor, embedding: UnifiedTensor) -> None:
        super().__init__()
        # Plain attributes: a table among the parameters would be reduced as a whole.
        self.features, self.embedding = features, embedding
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.features[rows], self.embedding[rows]], dim=1))[:, 0]


def step_together(table: UnifiedTensor, optimizer: torch.optim.Optimizer) -> None:
    """One step with the mean of all ranks' gradients; all ranks share the table's memory."""
    own = table.grad.coalesce()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (own.indices(), own.values()))
    if dist.get_rank() == 0:  # one writes, and all see it
        rows = torch.cat([rows for rows, _ in parts], dim=1)
        values = torch.cat([values for _, values in parts]) / len(parts)
        table.grad = torch.sparse_coo_tensor(rows, values, table.shape)
        optimizer.step()
    table.grad = None
    dist.barrier()  # nobody reads the next batch before the rows are written


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, NUM_ROWS, (BATCH,), generator=generator) for _ in range(NUM_STEPS)]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows / NUM_ROWS).square().mean()


def train_rank(features: UnifiedTensor, embedding: UnifiedTensor, folder: Path) -> dict[str, Any]:
    """What each process runs: losses, and the state of the model at the end."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    model = DistributedDataParallel(Scores(features, embedding))
    dense = torch.optim.Adam(model.parameters(), lr=0.05)
    sparse = Adam([embedding], lr=0.05)
    losses = []
    for rows in batches():
        loss = loss_of(model, rows.chunk(NUM_RANKS)[dist.get_rank()])
        loss.backward()
        dense.step()
        dense.zero_grad()
        step_together(embedding, sparse)
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"losses": losses, "state": state}


def test_two_processes_train_as_one_with_the_union_of_their_batches(tmp_path: Path):
    features = torch.randn(NUM_ROWS, 8)
    start = torch.randn(NUM_ROWS, 4)
    table, embedding = unify(features), unify(start, requires_grad=True)
    ranks = spawn(functools.partial(train_rank, table, embedding), NUM_RANKS, tmp_path)

    single = unify(start, requires_grad=True)
    model = Scores(unify(features), single)
    optimizers = torch.optim.Adam(model.parameters(), lr=0.05), Adam([single], lr=0.05)
    losses = []
    for rows in batches():
        loss = loss_of(model, rows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    assert table.is_shared() and embedding.is_shared()
    means = [
        sum(each) / NUM_RANKS for each in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    assert means == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    for rank in ranks:
        assert rank["state"].keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.allclose(rank["state"][name], value, rtol=1e-4, atol=1e-5), name
    found, expected = embedding.detach().cpu(), single.detach().cpu()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    touched = torch.cat(batches()).unique()
    changed = (found != start).any(1).nonzero().flatten()
    assert torch.equal(changed, touched)
