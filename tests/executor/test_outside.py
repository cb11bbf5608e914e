"""Tensors that are neither the model's nor the batch's: planned steps read them anew."""

import pytest
import torch
from torch import nn

import penstock
from _planned import MACHINE
from penstock.codegen import _cache

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"machine": MACHINE, "time_limit": 0.05, "cache": False}
BATCHES = [torch.randn(16, 64, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def double(tensor):
    with torch.no_grad():
        tensor.mul_(2)


CHANGES = {
    "in place": double,
    "past the version counter": lambda tensor: tensor.data.mul_(2),
    "by NumPy": lambda tensor: tensor.detach().numpy().__imul__(2),
    "another memory": lambda tensor: setattr(tensor, "data", tensor.data * 2),
}


def losses(change, planned, *, teacher, store=None, **options):
    torch.manual_seed(0)
    outside = nn.Linear(64, 64) if teacher else torch.ones(64)
    tensors = list(outside.parameters()) if teacher else [outside]
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(output, batch):
        if teacher:
            return (output - outside(batch).detach()).square().mean()
        return (output * outside).square().mean()

    if planned:
        arguments = {"loss": loss_of, "device_memory": "512KiB", "store": store}
        step = penstock.fit(model, optimizer, BATCHES[0], **arguments, **options, **OPTIONS)
    found = []
    for batch in BATCHES:
        if planned:
            found.append(step(batch))
        else:
            optimizer.zero_grad()
            loss = loss_of(model(batch), batch)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        for tensor in tensors:
            change(tensor)
    return found


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_tensors_from_outside_count(change, teacher):
    expected = losses(CHANGES[change], False, teacher=teacher)
    assert losses(CHANGES[change], True, teacher=teacher) == expected


def test_also_where_the_plan_comes_from_the_cache(store, tmp_path, monkeypatch):
    monkeypatch.setattr(_cache, "private_directory", lambda folder: tmp_path)
    monkeypatch.setitem(OPTIONS, "cache", True)
    expected = losses(double, False, teacher=True)
    for _ in range(2):
        assert losses(double, True, teacher=True, store=store) == expected
