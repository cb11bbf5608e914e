"""Products with Hessians and Fisher matrices against those that autograd writes out."""

from __future__ import annotations

import pytest
import torch

from penstock.spectral import eigs, fisher, hessian

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Linear(12, 6))
    return model.double(), torch.randn(40, 5).double(), torch.randint(6, (40,))


def test_the_largest_values_of_a_hessian(task):
    model, inputs, labels = task
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def flat_loss(flat):
        parts = flat.split([s.numel() for s in shapes])
        named = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        found = torch.func.functional_call(model, named, inputs)
        return torch.nn.functional.cross_entropy(found, labels)

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    expected = torch.linalg.eigvalsh(torch.func.hessian(flat_loss)(flat))
    loss = lambda: torch.nn.functional.cross_entropy(model(inputs), labels)  # noqa: E731
    for which, values in (("LA", expected[-3:]), ("SA", expected[:3])):
        pairs = eigs(hessian(loss, model.parameters()), 3, which=which)
        torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_the_fisher_matrix_over_batches(task):
    model, inputs, labels = task
    per_example = _gradients(model, inputs, labels)
    expected = torch.linalg.eigvalsh(per_example.T @ per_example / 40)[-3:]
    turn = iter(range(10**6))

    def losses():
        begin = 20 * (next(turn) % 2)
        part = slice(begin, begin + 20)
        return torch.nn.functional.cross_entropy(
            model(inputs[part]), labels[part], reduction="none"
        )

    pairs = eigs(fisher(losses, model.parameters(), num_batches=2), 3)
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-12)


def _gradients(model, inputs, labels):
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        loss = torch.nn.functional.cross_entropy(model(x[None]), y[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.reshape(-1) for g in found]))
    return torch.stack(rows)


def test_parameters_that_a_loss_does_not_reach():
    used, unused = torch.ones(150, requires_grad=True), torch.ones(3, requires_grad=True)
    pairs = eigs(hessian(lambda: (used**2).sum() / 2, [used, unused]), 2)
    torch.testing.assert_close(pairs.values, torch.ones(2).double(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="none of them requires a gradient"):
        hessian(lambda: torch.zeros(()), [torch.ones(3)])
