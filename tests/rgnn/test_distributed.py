"""DistributedDataParallel over gloo: two processes with half of the loss each are as one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _layer_models import features, graph_of_size, model_of
from penstock import rgnn

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

NUM_RANKS, NUM_NODES = 2, 12
NAMES = ["rgcn with bases", "rgat", "hgt"]


def loss_of(model: nn.Module, graph: rgnn.Graph, nodes: torch.Tensor) -> torch.Tensor:
    return model(features(NUM_NODES), graph)[nodes].square().mean()


def gradients_of_rank(rank: int, graph: rgnn.Graph, directory: str) -> None:
    """What each process runs: it leaves the gradients of its models in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    found = {}
    for name in NAMES:
        model = DistributedDataParallel(model_of(name))
        loss_of(model, graph, torch.arange(NUM_NODES).chunk(NUM_RANKS)[rank]).backward()
        found[name] = {key: p.grad for key, p in model.module.named_parameters()}
    torch.save(found, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path):
    graph = graph_of_size(NUM_NODES, 60)
    torch.multiprocessing.spawn(gradients_of_rank, args=(graph, str(tmp_path)), nprocs=NUM_RANKS)
    for name in NAMES:
        model = model_of(name)
        loss_of(model, graph, torch.arange(NUM_NODES)).backward()
        for rank in range(NUM_RANKS):
            found = torch.load(tmp_path / f"rank{rank}.pt")[name]
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(found[key], parameter.grad, msg=f"{name}: {key}")
