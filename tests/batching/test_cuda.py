"""What runs in batches on a GPU is what runs on the CPU, and peaks are those of its allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.batching import (
    BalancedBatchSampler,
    ByteModel,
    DynamicBatcher,
    TypedGraph,
    measured_peak,
    probe_batches,
)

pytestmark = pytest.mark.gpu


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 16)

    def forward(self, left, right):
        return torch.tanh(self.mix(torch.cat([left, right], dim=1)))


def trees():
    """Words come as numbers on the CPU."""
    found = []
    for count in (1, 2, 5, 9):
        tree = TypedGraph()
        nodes = [tree.add("word", inputs=[k]) for k in range(count)]
        while len(nodes) > 1:
            nodes = [*nodes[2:], tree.add("join", nodes[0], nodes[1])]
        found.append(tree)
    return found


@pytest.mark.parametrize("max_bytes", [None, "64KiB"])
def test_trees_run_on_the_device_of_their_cells(max_bytes):
    torch.manual_seed(0)
    batcher = DynamicBatcher(
        {"word": nn.Embedding(10, 16), "join": Join()}, max_bytes=max_bytes
    ).double()
    results = []
    for device in ("cpu", "cuda"):
        batcher.to(device).zero_grad()
        last = batcher(trees()).last()
        assert last.device.type == device
        last.square().sum().backward()
        gradients = [
            each.grad.cpu().clone() for each in batcher.parameters() if each.grad is not None
        ]
        results.append([last.detach().cpu(), *gradients])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-10)


def test_a_cap_of_predicted_bytes_holds_in_the_allocator():
    lengths = torch.randint(1000, 50_000, (200,), generator=torch.Generator().manual_seed(0))
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)

    def step(batch):
        x = torch.ones(int(lengths[batch].sum()), 64, device="cuda")
        (x @ weight).relu().sum().backward()
        weight.grad = None

    features = {"rows": lengths}
    model = ByteModel.fit(step, probe_batches(features), features, device="cuda")
    sampler = BalancedBatchSampler(model.costs(features), max_bytes="512MiB")
    for batch in sampler:
        peak, _ = measured_peak(lambda batch=batch: step(batch), "cuda")
        assert peak <= 512 << 20
