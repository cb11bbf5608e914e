"""Offloaded tensors serve autograd in every way in which saved ones do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from _waiting import wait_until
from penstock.memory import Tier


@pytest.fixture
def everything(store):
    """An Offload that sends out every eligible byte."""
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    yield offload
    gc.collect()
    offload.close()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Dropout(0.1)
    )


def train(model: nn.Module, num_steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last gradients of a few steps on seeded data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def test_training_is_bit_equal(everything):
    losses, gradients = train(small_model())
    with everything:
        offloaded_losses, offloaded_gradients = train(small_model())
    assert offloaded_losses == losses
    for ours, stock in zip(offloaded_gradients, gradients, strict=True):
        assert torch.equal(ours, stock)
    report = everything.report()
    assert report.num_steps == 3
    assert 0 < report.offloaded_bytes <= report.saved_bytes
    assert report.bytes_read + report.forwarded_bytes == report.offloaded_bytes


def test_saved_bytes_are_unique_storages_without_parameters(everything):
    weight = nn.Parameter(torch.randn(64, 64))
    hidden = torch.randn(128, 64, requires_grad=True) * 1.0
    with everything:
        q, k, v = (hidden @ weight).split([16, 16, 32], dim=1)  # three views of one storage
        out = (q.exp().sum() + k.sin().sum() + v.square().sum()) * 1.0
        out.backward()
    # matmul saves `hidden` and the weight (a parameter); exp saves its output (its own storage);
    # sin and pow save their inputs, both views of the product.
    product_bytes = 128 * 64 * 4
    expected = hidden.untyped_storage().nbytes() + 128 * 16 * 4 + product_bytes
    report = everything.report()
    scalars = report.saved_bytes - expected
    assert 0 <= scalars <= 64
    assert report.num_saved >= 3


def test_views_of_one_storage_keep_their_own_shape_and_place(everything):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 32)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        hidden = leaf * 2
        q, k, v = hidden.unbind(1)
        parts = (q.t(), k.flip(0), v[::2], hidden[3:5, 1:, 4:9], q[:1].expand(4, 32))
        loss = sum((part * part).sum() * (index + 1) for index, part in enumerate(parts))
        return torch.autograd.grad(loss, leaf)[0]

    expected = gradient()
    with everything:
        found = gradient()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_parts_that_count_their_changes_apart_leave_once(store, cell):
    """The gates of a cell are `unsafe_chunk`s of one storage, computed in place one by one."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, inputs = cell(32, 64), torch.randn(6, 64, 32)
        state: Any = None
        for x in inputs:
            state = module(x, state)
        (state[0] if cell is nn.LSTMCell else state).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    expected = gradients()
    offload = penstock.offload(store, policy="all", min_bytes="48KiB")  # the gates alone
    with offload:
        assert all(map(torch.equal, gradients(), expected))
    report = offload.report()
    assert 0 < report.offloaded_bytes <= 6 * 64 * 4 * 64 * 4
    assert report.bytes_read <= report.offloaded_bytes <= report.saved_bytes
    offload.close()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_and_negated_views(everything, dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=dtype)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        hidden = leaf * 2
        loss = (hidden.conj() @ hidden.mT.conj() * hidden.conj().imag).abs().sum()
        return torch.autograd.grad(loss, leaf)[0]

    expected = gradient()
    with everything:
        found = gradient()
    assert torch.equal(found, expected)


def test_bytes_leave_memory_and_come_back(store):
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    with offload:
        x = torch.randn(1024, 1024, requires_grad=True) * 1.0
        expected = x.detach().clone()
        y = x.exp().sin().sum()
        del x
        wait_until(lambda: offload.ledger.resident(Tier.DEVICE) <= 64)  # the sum's own scalar
        assert offload.ledger.resident(Tier.FILE) >= 4 * 1024**2
        saved = y.grad_fn.next_functions[0][0]._saved_self
        assert torch.equal(saved, expected.exp())
        y.backward()
    assert offload.report().bytes_read >= 4 * 1024**2
    wait_until(lambda: offload.ledger.resident(Tier.FILE) == 0)
    del saved, y
    offload.close()


def test_retain_graph_and_two_backwards(everything):
    x = torch.randn(256, 64, requires_grad=True)
    with everything:
        loss = (x * 1.0).exp().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, x.detach().exp())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_backward_after_the_block(everything):
    x = torch.randn(256, 64, requires_grad=True)
    with everything:
        loss = (x * 1.0).exp().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], x.detach().exp())


def test_double_backward(everything):
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)

    def second_order() -> torch.Tensor:
        loss = (x * 1.0).sin().exp().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    expected = second_order()
    with everything:
        assert torch.equal(second_order(), expected)


def test_abandoned_graph_frees_everything(everything):
    with everything:
        for _ in range(5):
            loss = small_model()(torch.randn(32, 64)).sum()
            del loss
    everything._engine.settle()
    wait_until(lambda: everything.ledger.resident(Tier.DEVICE) == 0)
    wait_until(lambda: everything.ledger.resident(Tier.FILE) == 0)


def test_a_storage_that_was_saved_in_two_ways_counts_once_while_it_is_in_use(everything):
    leaf = torch.randn(64, 64, requires_grad=True)
    x = leaf * 1
    other = x.data  # the same storage, with a version counter of its own
    with everything:
        twice = [x.sin(), x.cos()]
        wait_until(lambda: everything.ledger.resident(Tier.FILE) == 64 * 64 * 4)
        once = leaf * other  # whose bytes have left, so they are moved again
        last = once.exp()
        wait_until(lambda: everything.ledger.resident(Tier.FILE) == 3 * 64 * 64 * 4)
        in_use = [twice[0].grad_fn._saved_self, once.grad_fn._saved_other]
        in_use.append(twice[1].grad_fn._saved_self)
        everything._engine.settle()
        assert everything.ledger.resident(Tier.DEVICE) == 64 * 64 * 4
        del in_use, twice, once, last, x, other
    everything._engine.settle()
    wait_until(lambda: everything.ledger.resident(Tier.FILE) == 0)
    everything._engine.settle()
    assert everything.ledger.resident(Tier.DEVICE) == 0


def test_batches_that_the_caller_keeps_count_no_longer_than_they_are_saved(everything):
    model, batches = small_model(), [torch.randn(32, 64) for _ in range(10)]
    engine, resident = everything._engine, []
    with everything:
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            del loss
            wait_until(lambda: not (len(engine._records) or engine._busy))
            engine.settle()
            resident.append(everything.ledger.resident(Tier.DEVICE))
    assert resident == [0] * len(batches)


def test_exception_between_forward_and_backward(everything):
    def step() -> None:
        loss = small_model()(torch.randn(32, 64)).sum()
        raise KeyError(loss.item())

    with everything:
        for _ in range(3):
            with pytest.raises(KeyError):
                step()
        losses, _ = train(small_model())
    gc.collect()
    wait_until(lambda: everything.ledger.resident(Tier.FILE) == 0)
    assert losses == train(small_model())[0]


def test_several_forwards_before_one_backward(everything):
    model = small_model().eval()
    batches = [torch.randn(16, 64) for _ in range(4)]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        sum(model(batch).square().mean() for batch in batches).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with everything:
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert everything.report().num_steps == 1


def test_backward_in_the_order_of_the_forwards(everything):
    model = small_model().eval()
    batches = [torch.randn(16, 64) for _ in range(4)]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        for loss in [model(batch).square().mean() for batch in batches]:
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with everything:
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda x: x.add_(1),
    "view": lambda x: x[0].zero_(),
    "detached": lambda x: x.detach().mul_(2),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("wait", [True, False], ids=["written", "at once"])
def test_in_place_change_of_a_saved_tensor_raises(everything, change, wait):
    leaf = torch.randn(256, 64, requires_grad=True)
    with everything:
        hidden = leaf * 1.0
        loss = hidden.sin().sum()
        if wait:
            wait_until(lambda: everything.ledger.resident(Tier.FILE) > 0)
        with torch.no_grad():
            change(hidden)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_in_place_change_of_a_parameter_raises(everything):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with everything:
        loss = model(torch.randn(4, 8)).sum()
        with torch.no_grad():
            model[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_legal_in_place_operators(everything):
    x = torch.randn(256, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        hidden = (x * 2).mul_(3).tanh_()
        scaled = hidden + 1
        scaled[:, ::2] *= 3
        scaled.mul_(x).relu_()
        return torch.autograd.grad((scaled * hidden).sum(), x)[0]

    expected = gradient()
    with everything:
        assert torch.equal(gradient(), expected)


def test_data_alias_changed_between_two_saves(everything):
    """`x.data` has a version counter of its own: equal versions, different content."""
    x = torch.randn(64, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        hidden = x * 1.0
        first = (hidden.data * x).sum()
        hidden.data.mul_(2)
        second = (hidden.data * x).sum()
        return torch.autograd.grad(first + second, x)[0]

    with everything:
        found = gradient()
    # As stock, the first save may see the change; the second must.
    doubled = x.detach() * 2
    assert torch.equal(found, x.detach() + doubled) or torch.equal(found, doubled + doubled)


def test_tensor_saved_at_two_versions(everything):
    x = torch.randn(64, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        mask = torch.ones(64, 64)
        kept = x * mask.clone()
        mask = mask * 2
        first = x * mask
        other = x * (mask := mask + 1)
        return torch.autograd.grad((kept + first + other).sum(), x)[0]

    expected = gradient()
    with everything:
        assert torch.equal(gradient(), expected)


def test_zero_sized_scalar_and_integer_tensors(everything):
    x = torch.randn(16, 4, requires_grad=True)
    index = torch.tensor([0, 3, 3, 1])

    def gradient() -> torch.Tensor:
        hidden = x * 1.0
        loss = hidden[:0].exp().sum() + hidden[index].sin().sum() + hidden.sum().exp() * 1e-6
        return torch.autograd.grad(loss, x)[0]

    expected = gradient()
    with everything:
        assert torch.equal(gradient(), expected)


def test_sparse_tensor_stays(everything):
    matrix = torch.eye(8).to_sparse()
    dense = torch.randn(8, 8, requires_grad=True)
    with everything:
        gradient = torch.autograd.grad(torch.sparse.mm(matrix, dense * 1.0).sum(), dense)[0]
    assert torch.equal(gradient, torch.ones(8, 8))
    assert everything.report().reason.endswith("these kinds of tensors stay: torch.sparse_coo")


def test_tensor_subclass_stays_itself(everything):
    class Tagged(torch.Tensor):
        pass

    tagged = torch.randn(8, 8).as_subclass(Tagged)
    x = torch.randn(8, 8, requires_grad=True)
    with everything:
        out = tagged * (x * 1.0)
        out.sum().backward()
    assert torch.equal(x.grad, tagged.as_subclass(torch.Tensor))
    assert everything.report().saved_bytes <= 4  # the tagged one is not ours to count
    assert "stay: Tagged" in everything.report().reason


def test_parameters_of_a_subclass_are_not_said_to_stay(everything):
    class Tagged(torch.Tensor):
        pass

    weight = torch.randn(8, 8).as_subclass(Tagged).requires_grad_()
    x = torch.randn(8, 8, requires_grad=True)
    with everything:
        (weight.as_subclass(torch.Tensor) * (x * 1.0)).sum().backward()
        (weight * 2.0).sum().backward()
    assert "stay:" not in everything.report().reason


def test_small_storages_stay(store):
    offload = penstock.offload(store, policy="all", min_bytes="1MiB")
    with offload:
        train(small_model())
    report = offload.report()
    assert report.offloaded_bytes == 0 < report.saved_bytes
    assert report.num_kept == report.num_saved
    offload.close()


def test_nested_and_reentered(store):
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    with offload, offload:
        train(small_model())
    inside = offload.report().saved_bytes
    train(small_model())
    assert offload.report().saved_bytes == inside
    with offload:
        train(small_model())
    assert offload.report().saved_bytes == 2 * inside
    offload.close()


def test_one_offload_in_several_threads(everything):
    models = [small_model().eval() for _ in range(4)]
    batches = [torch.full((32, 64), 0.01 * step) for step in range(3)]

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        losses = [model(batch).square().mean() for batch in batches]
        return [g for loss in losses for g in torch.autograd.grad(loss, parameters)]

    expected = [gradients(model) for model in models]
    found: dict[int, list[torch.Tensor]] = {}

    def run(index: int) -> None:
        with everything:
            found[index] = gradients(models[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(4):
        assert all(torch.equal(a, b) for a, b in zip(found[index], expected[index], strict=True))
    assert everything.report().offloaded_bytes > 0


def test_threads_end_with_the_block(everything):
    with everything:
        train(small_model())
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("penstock")])


def test_closed_is_said(store):
    offload = penstock.offload(store, policy="all")
    with offload:
        loss = (torch.randn(1024, 1024, requires_grad=True) * 1.0).exp().sum()
    with pytest.raises(RuntimeError, match="still alive"):
        offload.close()
    loss.backward()
    offload.close()
    offload.close()
    with pytest.raises(RuntimeError, match="closed"), offload:
        pass


def test_arguments_are_checked(store):
    with pytest.raises(ValueError, match=r'policy="some"|policy=.some.'):
        penstock.offload(store, policy="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device_memory"):
        penstock.offload(store, device_memory="8 bananas")
    with pytest.raises(ValueError, match="no GPU"):
        penstock.offload()
