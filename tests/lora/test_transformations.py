"""The operator under torch's transformations: `torch.library`, `torch.compile`, `torch.func`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import forward_ad

from penstock.lora import Adapter, AdapterRows, add, linear

IN, OUT = 6, 5


@pytest.fixture(autouse=True)
def _forget_compiled_functions() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _layer(num_rows: int, num_adapters: int, dropout: float = 0.4, dtype=torch.float64):
    """Return x, the weight, and adapters of the ranks 2, 3, 2, ..."""
    x = torch.randn(num_rows, IN, dtype=dtype, requires_grad=True)
    weight = torch.randn(OUT, IN, dtype=dtype)
    adapters = [
        Adapter(
            torch.randn(2 + i % 2, IN, dtype=dtype, requires_grad=True),
            torch.randn(OUT, 2 + i % 2, dtype=dtype, requires_grad=True),
            scaling=1.5,
            dropout=dropout,
        )
        for i in range(num_adapters)
    ]
    return x, weight, adapters


def _operands(rows: AdapterRows, adapters: list[Adapter]) -> tuple:
    return (
        [adapter.down for adapter in adapters],
        [adapter.up for adapter in adapters],
        rows.order,
        list(rows.counts),
        list(rows.starts),
        [adapter.scaling for adapter in adapters],
        [adapter.dropout for adapter in adapters],
        torch.arange(len(adapters)),
    )


ASSIGNMENTS = [[0, 0, 1, 1, 1, -1], [1, 0, -1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]


# Torch 2.14 asks for `.grad` of opcheck's copies, where it hides warnings that are not errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("by_row", "form"),
    [(ASSIGNMENTS[0], "bias"), (ASSIGNMENTS[1], "no bias"), (ASSIGNMENTS[2], "add")],
)
def test_forward_is_an_operator_of_the_library(by_row, form):
    x, weight, adapters = _layer(6, 2)
    bias = torch.randn(OUT, dtype=torch.float64, requires_grad=True) if form == "bias" else None
    total = None
    if form == "add":
        weight, total = None, torch.randn(6, OUT, dtype=torch.float64, requires_grad=True)
    operands = _operands(AdapterRows.group(by_row, 2), adapters)
    torch.library.opcheck(torch.ops.penstock.lora_forward, (x, weight, bias, total, *operands))


@pytest.mark.parametrize(
    ("by_row", "needs"),
    [
        (ASSIGNMENTS[0], [True] + [False] * 4),
        (ASSIGNMENTS[1], [True] * 5),
        (ASSIGNMENTS[2], [False, True, False, False, True]),
    ],
)
def test_backward_is_an_operator_of_the_library(by_row, needs):
    """Also for operands whose rows and columns change places: gradients are contiguous."""
    x, weight, adapters = _layer(6, 2)
    x = torch.randn(IN, 6, dtype=torch.float64).t()
    down = torch.randn(IN, 2, dtype=torch.float64).t()
    adapters = [Adapter(down, adapters[0].up.detach()), *adapters[1:]]
    operands = _operands(AdapterRows.group(by_row, 2), adapters)
    operands = tuple(
        [each.detach() for each in part] if index < 2 else part
        for index, part in enumerate(operands)
    )
    for layer in (weight, None) if all(needs) else (weight,):
        total = None if layer is not None else torch.zeros(6, OUT, dtype=torch.float64)
        y, hidden = torch.ops.penstock.lora_forward(x, layer, None, total, *operands)
        torch.library.opcheck(
            torch.ops.penstock.lora_backward,
            (torch.randn_like(y), x, layer, hidden, *operands, needs),
        )


def _gradients(y: torch.Tensor, operands) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.sin().sum(), operands)


def _assert_same(a: torch.Tensor, b: torch.Tensor, operands) -> None:
    assert torch.equal(a, b)
    assert all(map(torch.equal, _gradients(a, operands), _gradients(b, operands)))


@pytest.mark.parametrize(
    ("by_row", "form"), list(zip(ASSIGNMENTS, (linear, add, linear), strict=True))
)
def test_compiled_without_a_break(by_row, form):
    x, weight, adapters = _layer(6, 2)
    rows = AdapterRows.group(by_row, 2)

    def run(x, seed):
        x = x * 2
        if form is add:
            return add(x @ weight.T, x, adapters, rows, seed=seed)
        return linear(x, weight, None, adapters, rows, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    operands = [x, *(each for adapter in adapters for each in (adapter.down, adapter.up))]
    _assert_same(compiled(x, 3), run(x, 3), operands)


def test_compiled_graph_has_the_operators_themselves():
    """Not the form for transformations, which keeps masked inputs."""
    names: list[str] = []

    def note(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    x, weight, adapters = _layer(6, 1)
    backend = aot_autograd(fw_compiler=_boxed(note), bw_compiler=_boxed(note))
    compiled = torch.compile(
        lambda x: linear(x, weight, None, adapters, seed=1), fullgraph=True, backend=backend
    )
    compiled(x).sum().backward()
    products = [name for name in names if ".mm." in name or ".index" in name]
    assert [name for name in names if "lora" in name] == [
        "penstock.lora_forward.default",
        "penstock.lora_backward.default",
    ]
    assert not products


def _boxed(compiler):
    from functorch.compile import make_boxed_func

    return lambda graph, inputs: make_boxed_func(compiler(graph, inputs))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_once_for_all_seeds_and_numbers_of_rows(dynamic):
    """Seeds beyond int64 are constants of a graph of their own; all are right."""
    weight = torch.randn(OUT, IN)
    _, _, adapters = _layer(1, 1, dtype=torch.float32)

    def run(x, seed):
        return linear(x, weight, None, adapters, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch._dynamo.utils.counters.clear()
    for step in range(5):
        x = torch.randn(7 + step, IN, requires_grad=True)
        _assert_same(compiled(x, step * 2**40 - 3), run(x, step * 2**40 - 3), [x])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for seed in (2**63 - 1, -(2**63), 2**63, -(2**70) - 1):
        x = torch.randn(9, IN, requires_grad=True)
        _assert_same(compiled(x, seed), run(x, seed), [x])


def test_compiled_once_for_seeds_in_a_tensor_and_for_all_assignments():
    """Counts and starts of each step's rows become symbols."""
    weight = torch.randn(OUT, IN)
    _, _, adapters = _layer(1, 2, dtype=torch.float32)

    def run(x, rows, seeds):
        return linear(x, weight, None, adapters, rows, seed=seeds)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        x = torch.randn(30, IN, requires_grad=True)
        seeds = torch.tensor([step, -step])
        rows = AdapterRows.of_runs([10 + step, 12 - step], num_rows=30)
        _assert_same(compiled(x, rows, seeds), run(x, rows, seeds), [x])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    rows = AdapterRows.group(torch.randint(-1, 2, (30,)), 2)
    _assert_same(compiled(x, rows, seeds), run(x, rows, seeds), [x])


def test_compiled_under_autocast():
    x, weight, adapters = _layer(6, 1, dtype=torch.float32)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x, weight, None, adapters, seed=5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert y.dtype == torch.bfloat16
    _assert_same(y, run(x), [x, adapters[0].down])


def _plain(rows, adapters, weight):
    """Return a function of x alone."""
    return lambda x: linear(x, weight, None, adapters, rows, seed=[3, 4]).sin()


@pytest.mark.parametrize("by_row", ASSIGNMENTS)
def test_derivatives_of_torch_func(by_row):
    x, weight, adapters = _layer(6, 2)
    run = _plain(AdapterRows.group(by_row, 2), adapters, weight)
    (wanted,) = torch.autograd.grad(run(x).sum(), x)
    x = x.detach()
    found = torch.func.grad(lambda x: run(x).sum())(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)

    tangent = torch.randn_like(x)
    step = 1e-6
    difference = (run(x + step * tangent) - run(x - step * tangent)) / (2 * step)
    value, derivative, *_ = torch.func.jvp(run, (x,), (tangent,))
    torch.testing.assert_close(value, run(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(derivative, difference, rtol=1e-6, atol=1e-6)
    with forward_ad.dual_level():
        dual = run(forward_ad.make_dual(x, tangent))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, derivative)


@pytest.mark.parametrize("trained", ["all", "ups"])
def test_gradients_of_many_outputs_at_once(trained):
    """As `is_grads_batched=True`, and as vmap around the backward pass, for one each."""
    x, weight, adapters = _layer(6, 2)
    for adapter in adapters:
        adapter.down.requires_grad_(trained == "all")
    y = _plain(AdapterRows.group([1, 0, -1, 0, 1, 1], 2), adapters, weight)(x)
    asked = [x, *(each for a in adapters for each in (a.down, a.up) if each.requires_grad)]
    many = torch.randn(3, *y.shape, dtype=y.dtype)

    def differentiate(dy, **arguments):
        return torch.autograd.grad(y, asked, dy, retain_graph=True, **arguments)

    wanted = [torch.stack(each) for each in zip(*map(differentiate, many), strict=True)]
    for found in (
        differentiate(many, is_grads_batched=True),
        torch.func.vmap(differentiate)(many),
    ):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_vectorised_jacobians_and_hessians_are_those_one_by_one():
    x, weight, adapters = _layer(3, 2)
    run = _plain(AdapterRows.group([0, -1, 1], 2), adapters, weight)
    for function, of in (("jacobian", run), ("hessian", lambda x: run(x).sum())):
        found, wanted = (
            getattr(torch.autograd.functional, function)(of, x.detach(), vectorize=vectorize)
            for vectorize in (True, False)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_compiled_transformations():
    x, weight, adapters = _layer(4, 1, dropout=0.0)

    def run(x):
        return linear(x, weight, None, adapters, seed=3).sin().sum()

    run_all = torch.func.vmap(torch.func.grad(run))
    compiled = torch.compile(lambda x: run_all(x), backend="eager", fullgraph=True)
    x = x.detach()[None].expand(3, 4, IN)
    torch.testing.assert_close(compiled(x), run_all(x), rtol=0, atol=1e-12)


def test_hessian_is_that_of_autograd():
    x, weight, adapters = _layer(3, 2)
    run = _plain(AdapterRows.group([0, -1, 1], 2), adapters, weight)
    x = x.detach()
    found = torch.func.hessian(lambda x: run(x).sum())(x)
    wanted = torch.autograd.functional.hessian(lambda x: run(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert wanted.abs().max() > 0.1


def test_vmap_has_the_mask_of_one_call_for_each():
    """Over inputs, and over the matrices of adapters that stand in one tensor."""
    x, weight, adapters = _layer(6, 2)
    rows = AdapterRows.group([1, 0, -1, 0, 1, 1], 2)
    run = _plain(rows, adapters, weight)
    stack = torch.randn(4, 6, IN, dtype=torch.float64)
    torch.testing.assert_close(
        torch.func.vmap(run)(stack), torch.stack([run(each) for each in stack]), rtol=0, atol=1e-12
    )
    downs, ups = torch.randn(4, 2, IN).double(), torch.randn(4, OUT, 2).double()

    def of_matrices(down, up):
        return linear(x, weight, None, [Adapter(down, up, dropout=0.5)], seed=2)

    torch.testing.assert_close(
        torch.func.vmap(of_matrices)(downs, ups),
        torch.stack(list(map(of_matrices, downs, ups))),
        rtol=0,
        atol=1e-12,
    )


def test_gradients_by_sample():
    x, weight, (adapter,) = _layer(6, 1, dropout=0.0)
    x = x.detach()

    def loss(down, row):
        return linear(row, weight, None, [Adapter(down, adapter.up)], seed=1).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(adapter.down.detach(), x)
    wanted = [torch.autograd.grad(loss(adapter.down, row), adapter.down)[0] for row in x]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=1e-12)


def test_checkpointed_forward_has_its_mask_again():
    from torch.utils.checkpoint import checkpoint

    x, weight, adapters = _layer(6, 1, dropout=0.5)

    def run(x):
        return linear(x, weight, None, adapters, seed=5).sin()

    y = checkpoint(run, x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    _assert_same(y, run(x), [x, adapters[0].up])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x, weight, adapters = _layer(6, 1)
    with mode():
        y = linear(x, weight, None, adapters, seed=5)
    assert not y.requires_grad
    assert torch.equal(y, linear(x, weight, None, adapters, seed=5))
