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


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda w: hessian(lambda: w @ w, w), TypeError, "parameters: got Tensor"),
        (lambda w: hessian(lambda: w @ w, {"w": w}.items()), TypeError, "without their names"),
        (lambda w: hessian(lambda: w @ w, [w, w]), ValueError, "given twice"),
        (lambda w: fisher(lambda: w * w, [w, w]), ValueError, "given twice"),
        (lambda w: hessian(lambda: w @ w, [w], num_batches=-1), ValueError, "num_batches is -1"),
        (lambda w: fisher(lambda: w * w, [w], num_batches=1.5), TypeError, "num_batches is 1.5"),
        (lambda w: hessian(w @ w, [w]), TypeError, "loss: got Tensor"),
    ],
)
def test_arguments_of_a_curvature_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make(torch.ones(3, requires_grad=True))


def bag(weight):
    return torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), weight)


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (lambda w: (w @ w, w @ w), TypeError, "returned a tuple"),  # of which torch takes the sum
        (lambda w: w * w, ValueError, r"shape \(3,\)"),
        (lambda w: (w @ w).item(), TypeError, "returned a float"),
        (lambda w: (w @ w).detach(), ValueError, "without a graph"),
        (lambda w: torch.ones(3, requires_grad=True).sum(), ValueError, "does not depend"),
        (
            lambda w: bag(w.reshape(3, 1)).square().sum(),
            NotImplementedError,
            "no second derivative",
        ),
    ],
)
def test_losses_without_a_hessian_are_refused(loss, error, text):
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=text):
        eigs(hessian(lambda: loss(w), [w]), 1)


@pytest.mark.parametrize(
    ("losses", "error", "text"),
    [
        (lambda w: (w * w).reshape(3, 1), ValueError, r"shape \(3, 1\)"),  # of tokens, not examples
        (lambda w: w @ w, ValueError, r"shape \(\)"),
        (lambda w: list(w), TypeError, "returned a list"),
        (lambda w: (w * w)[:0], ValueError, "no losses"),
        (lambda w: torch.ones(3, requires_grad=True) * 2, ValueError, "does not depend"),
    ],
)
def test_losses_without_a_fisher_matrix_are_refused(losses, error, text):
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=text):
        eigs(fisher(lambda: losses(w), [w]), 1)


def test_gradients_of_sparse_embeddings():
    weight = torch.ones(3, 1, requires_grad=True)
    places = torch.tensor([1, 2, 2])

    def loss():
        return torch.nn.functional.embedding(places, weight, sparse=True).square().sum()

    assert eigs(hessian(loss, [weight]), 2).values.tolist() == [2.0, 4.0]
    pairs = eigs(fisher(lambda: loss().reshape(1), [weight]), 1)
    torch.testing.assert_close(pairs.values, torch.tensor([20.0], dtype=torch.float64))


def test_a_random_loss_is_told_from_a_matrix_that_is_not_symmetric():
    w = torch.ones(200, requires_grad=True)
    with pytest.raises(ValueError, match="no dropout"):
        eigs(hessian(lambda: torch.nn.functional.dropout(w.square()).square().sum(), [w]), 1)
