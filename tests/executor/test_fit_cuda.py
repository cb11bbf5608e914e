"""`fit` on a GPU: half precision, shapes that alternate, the user's streams, no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from _planned import everything
from _steps import differences
from penstock.errors import InfeasibleError

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"machine": "h200", "time_limit": 1, "cache": False}
NUM_STEPS = 9  # more than are timed


class Perceptron(nn.Module):
    """Layers in bfloat16 by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)), nn.Linear(256, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = self.layers(x)
        return y.float().square().mean()


def trained(batches: list[torch.Tensor], planned: bool, share: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Perceptron().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if planned:
        shapes = list({each.shape: each for each in batches}.values())
        budget = int(share * 64 * 2**20)
        arguments = {
            "device_memory": budget,
            "host_memory": "1GiB",
            "extra_batches": shapes[1:],
            **OPTIONS,
        }
        with penstock.fit(model, optimizer, shapes[0], **arguments) as step:
            losses = [step(batch) for batch in batches]
        return everything(model, optimizer, losses)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return everything(model, optimizer, losses)


def test_bfloat16_by_autocast() -> None:
    batches = [torch.randn(64, 256, device="cuda") for _ in range(NUM_STEPS)]
    assert differences(trained(batches, False), trained(batches, True, 1 / 4), "") == []


def test_shapes_that_alternate() -> None:
    batches = [torch.randn(64 - 32 * (n % 2), 256, device="cuda") for n in range(2 * NUM_STEPS)]
    assert differences(trained(batches, False), trained(batches, True, 1 / 4), "") == []


def test_beside_a_stream_and_a_graph_of_the_users() -> None:
    batches = [torch.randn(64, 256, device="cuda") for _ in range(NUM_STEPS)]
    expected = trained(batches, False)
    weights, sums = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.add_(weights)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
        found = trained(batches, True)
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert differences(expected, found, "") == []
    assert sums.unique().tolist() == [2.0]


def test_a_device_without_room_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = Perceptron().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 256, device="cuda")
    before = everything(model, optimizer, [])
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - (16 << 20)), dtype=torch.uint8, device="cuda")
    with pytest.raises((torch.OutOfMemoryError, InfeasibleError)):
        penstock.fit(model, optimizer, batch, device_memory="64MiB", **OPTIONS)
    del hog
    torch.cuda.empty_cache()
    after = everything(model, optimizer, [])
    assert differences(before["model"], after["model"], "") == []
    with penstock.fit(model, optimizer, batch, device_memory="64MiB", **OPTIONS) as step:
        assert torch.isfinite(step(batch))
