"""Storages below `min_bytes`: they stay with little ado, and a budget has them packed."""

from __future__ import annotations

import threading

import pytest
import torch

import penstock
from _waiting import wait_until_nothing_is_resident
from penstock.memory import Tier

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread", "language")]
KIB = 1024


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = (x * 1.01).sin()
    return x.sum()


def gradient(num_floats: int, length: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, num_floats).requires_grad_()
    return torch.autograd.grad(chain(x, length), x)[0]


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize(
    ("num_bytes", "length", "budget"),
    [(100 * KIB, 40, 2048 * KIB), (64, 800, 16 * KIB), (5 * KIB, 50, 100 * KIB), (64, 60, 1 * KIB)],
)
def test_the_budget_holds_for_what_is_smaller_than_min_bytes(
    store, policy, num_bytes, length, budget
):
    expected = gradient(num_bytes // 4, length)
    offload = penstock.offload(store, policy=policy, device_memory=budget)
    with offload:
        for _ in range(3):
            assert torch.equal(gradient(num_bytes // 4, length), expected)
    report = offload.report()
    assert report.saved_bytes > 2 * budget and report.offloaded_bytes > 0
    assert report.num_kept * num_bytes == report.saved_bytes - report.offloaded_bytes
    assert report.num_steps == 3
    assert report.peak_device_bytes <= budget + num_bytes
    assert policy == "all" or "device budget" in report.reason
    wait_until_nothing_is_resident(offload)
    offload.close()


def test_without_a_budget_they_stay_and_are_counted(store):
    expected = gradient(16, 100)
    offload = penstock.offload(store)
    with offload:
        for _ in range(2):
            assert torch.equal(gradient(16, 100), expected)
    report = offload.report()
    assert report.saved_bytes == 2 * 100 * 64 and report.num_saved == 200
    assert report.offloaded_bytes == 0 and report.num_steps == 2
    assert report.peak_device_bytes == 100 * 64
    assert "smaller than min_bytes" in report.reason
    wait_until_nothing_is_resident(offload)
    offload.close()


@pytest.mark.parametrize("what", ["small", "leaf", "buffer"])
def test_without_a_budget_a_change_in_place_is_found(store, what):
    offload = penstock.offload(store)
    module, x = torch.nn.BatchNorm1d(16).eval(), torch.ones(4, 16, requires_grad=True)
    with offload:
        first = x * 2
        changed = {"small": first, "leaf": module.weight, "buffer": module.running_var}[what]
        loss = module(first.sin()).sum()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    del loss
    offload.close()


def test_without_a_budget_parameters_and_windows_on_data_are_not_counted(store):
    data, weight = torch.randn(64, 16), torch.ones(16, requires_grad=True)
    offload = penstock.offload(store)
    with offload:
        for row in data:
            loss = (row * weight).sum() + (row[None].T * weight[1:3]).sum()
            loss.backward()
            assert torch.autograd.grad((weight[2:].sin() * data[3, 2:]).sum(), weight)
    report = offload.report()
    assert report.num_saved == report.saved_bytes == 0
    offload.close()


@pytest.fixture
def packing(store):
    """Sixteen small tensors fill a chunk, four chunks the budget."""
    offload = penstock.offload(store, device_memory=4 * KIB)
    yield offload
    offload.close()
    assert all(offload.ledger.resident(tier) == 0 for tier in Tier)


def test_a_graph_is_used_twice_and_differentiated_twice(packing):
    def run() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 16).requires_grad_()
        loss = chain(x, 200)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (again,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), again, second]

    expected = run()
    with packing:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert packing.report().offloaded_bytes > 0


def test_views_complex_numbers_and_other_types(packing):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.complex64).requires_grad_()
        w = torch.randn(4, 4, dtype=torch.float64).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for n in range(40):
            y = (x * (1 + n)).conj().t()
            z = (w * n)[1:].t()
            total = total + (y * y.imag).abs().sum() + (z * z).exp().mean() + w[:, 1].sin().sum()
            total = total + torch.where(w > 0, w * w, w)[index(n)].sum()
        return list(torch.autograd.grad(total, (x, w)))

    def index(n: int) -> torch.Tensor:
        return torch.tensor([n % 4, 1, 2])

    expected = run()
    with packing:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert packing.report().offloaded_bytes > 0


def test_a_change_in_place_is_found_after_packing(packing):
    x = torch.ones(16, requires_grad=True)
    with packing:
        first = x * 2
        loss = first.sin().sum() + chain(x, 200)
        assert packing.report().offloaded_bytes > 0
        first.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    del loss


def test_threads_and_graphs_that_are_abandoned(packing):
    expected, problems = gradient(16, 200), []

    def work() -> None:
        with packing:
            for turn in range(3):
                if not torch.equal(gradient(16, 200), expected):
                    problems.append(turn)
                chain(torch.ones(16, requires_grad=True), 100)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_what_its_operator_fills_is_packed_afterwards(packing):
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 64).requires_grad_()
        y = x
        for _ in range(60):
            y = torch.nn.functional.rrelu(y * 1.1, training=True)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = run()
    with packing:
        for _ in range(3):
            assert torch.equal(run(), expected)
    assert packing.report().offloaded_bytes > 0
