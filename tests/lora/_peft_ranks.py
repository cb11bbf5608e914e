"""Work of the ranks in the tests of `penstock.lora.fuse`."""

from pathlib import Path

import torch
from _peft_models import gradients, make, make_batch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from penstock.lora import fuse
from penstock.lora._fused_layer import draw_seeds

NAMES = [["default", "other", "__base__"], ["other", "default", "other"]]


def train_with_names(_: Path) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of two steps, with other names on each rank, and a seed."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    seed = draw_seeds(1)
    model = fuse(make(second={"r": 2}))
    shared = DistributedDataParallel(model)
    rank, found = distributed.get_rank(), []
    for step in range(2):
        names = NAMES[(rank + step) % 2]
        shared(**make_batch(seed=rank), adapter_names=names).loss.backward()
        found.append(gradients(model))
    return [{"seed": seed}, *found]


def expected_gradients() -> list[dict[str, torch.Tensor]]:
    """Return the gradients of the same two steps in one process."""
    model, found = fuse(make(second={"r": 2})), []
    for step in range(2):
        for rank in range(2):
            names = NAMES[(rank + step) % 2]
            (model(**make_batch(seed=rank), adapter_names=names).loss / 2).backward()
        found.append(gradients(model))
    return found
