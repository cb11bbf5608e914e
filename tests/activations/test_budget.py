"""`device_memory` and `host_memory` are never exceeded by more than one storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from _waiting import wait_until_written
from penstock.activations._routes import Declined, FileRoute
from penstock.errors import CapacityError
from penstock.memory import ExtentFile, FileStore, Ledger

KIB = 1024
HIDDEN = 256


def model_of(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*[module for pair in layers for module in pair])


def gradients(model: nn.Module, batch: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(batch)
    model(torch.randn(batch, HIDDEN)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def saved_bytes(store, model: nn.Module, batch: int) -> tuple[int, int]:
    """Return the bytes that one step saves, in all and at most in one storage."""
    with penstock.offload(store, policy="all", min_bytes="1GiB") as offload:
        gradients(model, batch)
    return offload.report().saved_bytes, batch * HIDDEN * 4


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("fraction", [2, 4, 16])
def test_device_memory_holds_from_the_first_step(store, policy, fraction):
    model = model_of(8)
    expected = gradients(model, 256)
    total, largest = saved_bytes(store, model, 256)
    budget = total // fraction
    offload = penstock.offload(store, device_memory=budget, policy=policy, min_bytes="4KiB")
    for _ in range(4):
        with offload:
            assert equal(gradients(model, 256), expected)
        assert offload.report().peak_device_bytes <= budget + largest
    assert offload.report().peak_device_bytes > budget // 4
    offload.close()


def test_auto_uses_the_budget_it_is_given(store):
    model = model_of(8)
    total, _ = saved_bytes(store, model, 256)
    offload = penstock.offload(store, device_memory=2 * total, min_bytes="4KiB")
    with offload:
        gradients(model, 256)
        first = offload.report().offloaded_bytes
        gradients(model, 256)
        gradients(model, 256)
    assert offload.report().offloaded_bytes == first  # the first step measures, then all stays
    assert "fits" in offload.report().reason
    offload.close()


def test_a_slow_store_blocks_and_never_exceeds(store):
    model = model_of(4)
    expected = gradients(model, 256)
    total, largest = saved_bytes(store, model, 256)
    slow = FileStore(str(store), write_bytes_per_second=20e6, read_bytes_per_second=20e6)
    offload = penstock.offload(slow, device_memory=total // 4, policy="all", min_bytes="4KiB")
    with offload:
        assert equal(gradients(model, 256), expected)
    report = offload.report()
    assert report.peak_device_bytes <= total // 4 + largest
    assert report.stall_seconds > 0
    offload.close()


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_batch_shapes_that_change_and_models_in_turn(store, policy):
    models = [model_of(6), model_of(3)]
    batches = [256, 64, 150, 8, 256, 129]
    expected = {
        (index, batch): gradients(model, batch)
        for index, model in enumerate(models)
        for batch in batches
    }
    total, largest = saved_bytes(store, models[0], 256)
    budget = total // 4
    offload = penstock.offload(store, device_memory=budget, policy=policy, min_bytes="4KiB")
    with offload:
        for batch in batches:
            for index, model in enumerate(models):
                assert equal(gradients(model, batch), expected[index, batch])
    assert offload.report().peak_device_bytes <= budget + largest
    offload.close()


def test_interleaved_graphs_keep_within_the_budget(store):
    model = model_of(4)
    expected = [gradients(model, batch) for batch in (64, 128, 256)]
    total, largest = saved_bytes(store, model, 256)
    offload = penstock.offload(store, device_memory=total // 4, policy="all", min_bytes="4KiB")
    with offload:
        losses = []
        for batch in (64, 128, 256):
            torch.manual_seed(batch)
            losses.append(model(torch.randn(batch, HIDDEN)).square().mean())
        for loss, gradient in zip(losses, expected, strict=True):
            model.zero_grad()
            loss.backward()
            assert equal([parameter.grad for parameter in model.parameters()], gradient)
        del loss, losses
    assert offload.report().peak_device_bytes <= total // 4 + largest
    offload.close()


def test_host_memory_bounds_the_unaligned_ends(store):
    model = model_of(4)
    expected = gradients(model, 100)
    offload = penstock.offload(store, host_memory=16 * KIB, policy="all", min_bytes="4KiB")
    with offload:
        assert equal(gradients(model, 100), expected)
    assert offload.report().peak_host_bytes <= 16 * KIB
    offload.close()


def test_ends_of_storages_that_are_written_at_once_fit_host_memory(store, monkeypatch):
    route = FileRoute(ExtentFile(store), Ledger(), host_memory=5 * KIB)
    storage = torch.ones(2 * KIB).untyped_storage()
    stored, refused = ExtentFile.store, []

    def write(file, *arguments):
        """Write, while another storage asks for the same room."""
        with pytest.raises(Declined):
            route.store(storage, None)
        refused.append(arguments)
        return stored(file, *arguments)

    monkeypatch.setattr(ExtentFile, "store", write)
    copy = route.store(storage, None)
    route.discard(copy)
    route.discard(route.store(storage, None))  # now there is room again
    assert len(refused) == 2
    route.close()


def test_what_host_memory_has_no_room_for_has_stayed(store):
    """The report counts it as kept and says why; nothing was forwarded either."""
    model = model_of(4)
    expected = gradients(model, 100)
    with penstock.offload(store, host_memory=0, policy="all", min_bytes="4KiB") as offload:
        assert equal(gradients(model, 100), expected)
    report = offload.report()
    assert report.num_kept == report.num_saved > 0
    assert report.offloaded_bytes == report.bytes_written == report.forwarded_bytes == 0
    assert "some of it stayed: host_memory of 0 bytes" in report.reason
    offload.close()


def test_a_budget_that_host_memory_keeps_from_being_held_is_an_error(store):
    model = model_of(4)
    offload = penstock.offload(
        store, host_memory=0, device_memory="200KiB", policy="all", min_bytes="4KiB"
    )
    with offload, pytest.raises(CapacityError, match=r"had to stay.*Raise host_memory, or rai"):
        gradients(model, 100)
    expected = gradients(model, 10)
    with offload:  # what it takes fits
        assert equal(gradients(model, 10), expected)
    offload.close()


def test_a_storage_that_leaves_again_counts_again(store):
    x = torch.ones(100, 100, requires_grad=True)
    with penstock.offload(store, policy="all", min_bytes=0) as offload:
        saved = x * 2
        first = saved.sin()
        wait_until_written(offload)
        second = first * saved.data  # which has another counter
        assert torch.autograd.grad((first + second).sum(), x)[0].isfinite().all()
    report = offload.report()
    assert 0 <= report.num_kept <= report.num_saved
    assert report.offloaded_bytes <= report.saved_bytes
