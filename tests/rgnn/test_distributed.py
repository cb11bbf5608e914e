"""DistributedDataParallel over gloo: two processes with half of the loss each are as one."""

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

from _layer_models import features, graph_of_size, model_of
from _ranks import spawn
from penstock import rgnn

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

NUM_RANKS, NUM_NODES = 2, 12
NAMES = ["rgcn with bases", "rgat", "hgt"]


def loss_of(model: nn.Module, graph: rgnn.Graph, nodes: torch.Tensor) -> torch.Tensor:
    return model(features(NUM_NODES), graph)[nodes].square().mean()


def gradients_of_rank(graph: rgnn.Graph, folder: Path) -> dict[str, Any]:
    """Gradients of the models of one process, by model and parameter."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {}
    for name in NAMES:
        model = DistributedDataParallel(model_of(name))
        loss_of(model, graph, torch.arange(NUM_NODES).chunk(NUM_RANKS)[dist.get_rank()]).backward()
        found[name] = {key: p.grad for key, p in model.module.named_parameters()}
    return found


def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path):
    graph = graph_of_size(NUM_NODES, 60)
    ranks = spawn(functools.partial(gradients_of_rank, graph), NUM_RANKS, tmp_path)
    for name in NAMES:
        model = model_of(name)
        loss_of(model, graph, torch.arange(NUM_NODES)).backward()
        for found in ranks:
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(found[name][key], parameter.grad, msg=f"{name}: {key}")
