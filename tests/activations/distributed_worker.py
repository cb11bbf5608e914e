"""One process of `test_distributed`, started by torchrun: trains with and without offloading.

Writes a JSON file of what it saw, one entry a case, into the directory given as the first argument;
the second is the store. A case that fails leaves its traceback there and stops no other.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock

HIDDEN = 256  # a weight has 256 KiB and more, a hidden activation 4 KiB
BATCH = 4
NUM_LAYERS = 3
NUM_STEPS = 4


class Layer(nn.Module):
    """Feed-forward with a norm and dropout; checkpointed if asked for."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return x + checkpoint(self._feed_forward, x, use_reentrant=False)
        return x + self._feed_forward(x)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def layers(*, recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(recompute=recompute) for _ in range(NUM_LAYERS)])


def distributed_data_parallel() -> nn.Module:
    return DistributedDataParallel(layers())


def fully_sharded(
    *,
    recompute: bool = False,
    reshard_after_forward: bool = True,
    frozen: bool = False,
    half: bool = False,
) -> nn.Module:
    model = layers(recompute=recompute)
    if frozen:
        for layer in model:
            layer.up.requires_grad_(False)
            layer.down.requires_grad_(False)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": reshard_after_forward,
    }
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def tensor_parallel() -> nn.Module:
    """Layers whose hidden activations are DTensors."""
    model = layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "ddp": distributed_data_parallel,
    "fsdp2": fully_sharded,
    "fsdp2 kept": lambda: fully_sharded(reshard_after_forward=False),
    "fsdp2 checkpoint": lambda: fully_sharded(recompute=True),
    "fsdp2 bfloat16": lambda: fully_sharded(half=True),
    "fsdp2 frozen": lambda: fully_sharded(frozen=True),
    "tensor parallel": tensor_parallel,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module) -> list[torch.Tensor]:
    """Loss and this rank's gradients of every step, and its parameters after the last."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    seen = []
    for _ in range(NUM_STEPS):
        loss = model(torch.randn(BATCH, HIDDEN)).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(local(parameter.grad).clone() for parameter in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(parameter).detach().clone() for parameter in model.parameters()]


def run_case(build: Callable[[], nn.Module], store: str) -> dict[str, Any]:
    expected = train(build())
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    with offload:
        found = train(build())
    report = offload.report()
    equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    offload.close()
    return {
        "num_compared": len(equal),
        "num_different": equal.count(False),
        "saved_bytes": report.saved_bytes,
        "offloaded_bytes": report.offloaded_bytes,
        "bytes_read": report.bytes_read,
        "num_steps": report.num_steps,
        "reason": report.reason,
    }


def main(directory: Path, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results: dict[str, Any] = {}
    for name, build in CASES.items():
        try:
            results[name] = run_case(build, store)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
