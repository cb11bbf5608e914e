"""The operator: PEFT's formula, its gradients, and what autograd keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from penstock.batching import measured_peak
from penstock.lora import Adapter, AdapterRows, _products, add, linear
from penstock.lora._operator import uses_of

IN, OUT = 6, 5

LAYOUTS: dict[str, tuple[list[int], int]] = {
    "one adapter": ([0] * 7, 1),
    "one row": ([0], 1),
    "runs": ([0, 0, 1, 1, 1, 2], 3),
    "interleaved": ([2, 0, 1, 2, 0, 0, 1], 3),
    "rows of no adapter": ([-1, 0, 0, -1, 1, -1, 0], 2),
    "empty adapters": ([1, 1, 3, 1, -1], 5),
    "no row of any": ([-1, -1, -1], 2),
    "no adapter": ([-1, -1], 0),
    "no row": ([], 2),
}
"""Assignments by name, and the number of adapters."""


def _adapters(
    num: int, rank: int, dropout: float, dtype: torch.dtype = torch.float64, *, sizes=(IN, OUT)
) -> list[Adapter]:
    return [
        Adapter(
            torch.randn(rank + i % 2, sizes[0], dtype=dtype, requires_grad=True),
            torch.randn(sizes[1], rank + i % 2, dtype=dtype, requires_grad=True),
            scaling=0.5 + i,
            dropout=0.0 if i == 1 else dropout,
        )
        for i in range(num)
    ]


def _operands(adapters: Sequence[Adapter]) -> list[torch.Tensor]:
    return [each for adapter in adapters for each in (adapter.down, adapter.up)]


def _rebuild(adapters: Sequence[Adapter], matrices: Sequence[torch.Tensor]) -> list[Adapter]:
    pairs = zip(adapters, matrices[::2], matrices[1::2], strict=True)
    return [Adapter(down, up, each.scaling, each.dropout) for each, down, up in pairs]


def _compare(result, expected, operands, rtol: float, atol: float) -> None:
    """Compare outputs, and their gradients for all operands."""
    _assert_close(result, expected.to(result.dtype), rtol, atol)
    dy = torch.randn_like(expected)
    found = torch.autograd.grad(result, operands, dy.to(result.dtype), materialize_grads=True)
    wanted = torch.autograd.grad(expected, operands, dy, materialize_grads=True)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        _assert_close(a, b, rtol, atol)


def _assert_close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    """Compare two tensors; torch's own comparison takes ten times as long and says what differs."""
    if a.shape != b.shape or not torch.allclose(a, b, rtol=rtol, atol=atol):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.9])
def test_formula_of_peft_in_float64(oracle, masks_by, layout, rank, dropout):
    by_row, num = LAYOUTS[layout]
    adapters, seeds = _adapters(num, rank, dropout), list(range(-1, num - 1))
    x = torch.randn(len(by_row), IN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(OUT, IN, dtype=torch.float64, requires_grad=True)
    for bias in (None, torch.randn(OUT, dtype=torch.float64, requires_grad=True)):
        operands = [x, weight, *_operands(adapters), *([] if bias is None else [bias])]
        result = linear(x, weight, bias, adapters, by_row, seed=seeds)
        expected = oracle.formula(x, weight, bias, adapters, by_row, seeds)
        _compare(result, expected, operands, rtol=0, atol=1e-10)


# By the dtype with the fewer bits: float32 products of 6 terms and sums of 7 rows lie within 1e-5;
# one rounding of 11 or 8 bits is 5e-4 or 4e-3 of an element, and sums keep it where terms cancel.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@pytest.mark.parametrize("layout", ["one adapter", "interleaved", "rows of no adapter"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("base", "of_adapters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
    ],
)
def test_formula_of_peft_in_other_dtypes(oracle, masks_by, layout, dropout, base, of_adapters):
    by_row, num = LAYOUTS[layout]
    exact = _adapters(num, 3, dropout)
    matrices = [each.detach().to(of_adapters).requires_grad_() for each in _operands(exact)]
    x, weight, bias = (torch.randn(n).to(base) for n in ((len(by_row), IN), (OUT, IN), (OUT,)))
    x.requires_grad_()
    result = linear(x, weight, bias, _rebuild(exact, matrices), by_row, seed=range(num))
    assert result.dtype == base
    expected = oracle.formula(
        x.double(),
        weight.double(),
        bias.double(),
        _rebuild(exact, [each.double() for each in matrices]),
        by_row,
        range(num),
    )
    tolerance = max(TOLERANCES.get(each, 0) for each in (base, of_adapters))
    _compare(result, expected, [x, *matrices], rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_more_rows_than_a_tile(oracle, masks_by, interleaved, dtype):
    """1100 rows of an adapter are three tiles, whose sums are not rounded to 8 bits in between."""
    by_row = [0, 1, 0, -1] * 550 if interleaved else [0] * 1100
    sizes = (33, 17)
    adapters = _adapters(2 if interleaved else 1, 4, 0.3, dtype, sizes=sizes)
    x, weight = torch.randn(len(by_row), 33).to(dtype), torch.randn(17, 33).to(dtype)
    x.requires_grad_()
    result = linear(x, weight, None, adapters, by_row, seed=[5, 6][: len(adapters)])
    matrices = [each.double() for each in _operands(adapters)]
    expected = oracle.formula(
        x.double(), weight.double(), None, _rebuild(adapters, matrices), by_row, [5, 6]
    )
    atol = {torch.float64: 1e-10, torch.float32: 2e-3, torch.bfloat16: 2.0}[dtype]
    _compare(result, expected, [x, *_operands(adapters)], rtol=atol / 100, atol=atol)


def test_sums_over_many_tiles_are_rounded_once():
    """Sixteen tiles that were added in bfloat16 would be rounded sixteen times.

    A product of one tile is rounded as well, so that the bound is a rounding and a half.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8192, 64, generator=generator).bfloat16()
    down, up = (torch.rand(n, generator=generator).bfloat16() for n in ((4, 64), (32, 4)))
    dy = torch.rand(8192, 32, generator=generator).bfloat16()
    adapter = Adapter(down.requires_grad_(), up.requires_grad_())
    y = linear(x, torch.zeros(32, 64).bfloat16(), None, [adapter], seed=0)
    found = torch.autograd.grad(y, (down, up), dy)
    hidden = (x.double() @ down.double().T).bfloat16().double()
    ds = (dy.double() @ up.double()).bfloat16().double()
    for a, b in zip(found, (ds.T @ x.double(), dy.double().T @ hidden), strict=True):
        assert ((a.double() - b) / b).abs().max() < 1.5 * 2**-8


@pytest.mark.parametrize(
    ("by_row", "num", "dropout", "trained_layer"),
    [
        ([0, 0, 0], 1, 0.0, True),
        ([0, 0, 0], 1, 0.4, False),
        ([0], 1, 0.4, True),
        ([0, 0, 1, 2], 3, 0.4, True),
        ([2, 0, 1, 0], 3, 0.4, False),
        ([1, 1, 3, -1], 5, 0.0, False),
    ],
    ids=["one adapter", "with dropout", "one row", "runs", "interleaved", "empty adapters"],
)
def test_gradients_and_their_gradients(by_row, num, dropout, trained_layer):
    """In few rows: each number of each operand is changed."""
    adapters = _adapters(num, 1, dropout, sizes=(3, 2))
    rows = AdapterRows.group(by_row, num)
    x = torch.randn(len(by_row), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=trained_layer)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=trained_layer)

    def run(x, weight, bias, *matrices):
        return linear(x, weight, bias, _rebuild(adapters, matrices), rows, seed=8)

    operands = (x, weight, bias, *_operands(adapters))
    assert gradcheck(run, operands)
    assert gradgradcheck(run, operands)


def test_operands_that_depend_on_each_other_are_followed_once():
    """Also with `create_graph`, where the operator's backward pass is one of autograd's own."""
    (adapter,) = _adapters(1, 2, 0.4)
    base = torch.randn(4, IN, dtype=torch.float64)
    weight = torch.randn(OUT, IN, dtype=torch.float64)
    x = base @ (adapter.down.T @ adapter.down)
    y = linear(x, weight, None, [adapter], seed=8).sin().sum()
    operands = (adapter.down, adapter.up)
    wanted = torch.autograd.grad(y, operands, retain_graph=True)
    found = torch.autograd.grad(y, operands, create_graph=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_gradients_of_add_and_their_gradients():
    (adapter,) = _adapters(1, 2, 0.4, sizes=(3, 2))
    y = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run(y, x, *matrices):
        return add(y, x, _rebuild([adapter], matrices), [0, -1, 0, 0], seed=8)

    assert gradcheck(run, (y, x, adapter.down, adapter.up))
    assert gradgradcheck(run, (y, x, adapter.down, adapter.up))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_add_is_linear_without_the_layer(masks_by, layout):
    by_row, num = LAYOUTS[layout]
    adapters = _adapters(num, 3, 0.3)
    layer = torch.nn.Linear(IN, OUT, dtype=torch.float64)
    x = torch.randn(len(by_row), IN, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    before = y.detach().clone()
    result = add(y, x, adapters, by_row, seed=3)
    assert torch.equal(y, before)  # the layer's output is not overwritten
    expected = linear(x, layer.weight, layer.bias, adapters, by_row, seed=3)
    _compare(result, expected, [x, layer.weight, *_operands(adapters)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("of_y", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_x", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_adapters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_add_in_three_dtypes(oracle, of_y, of_x, of_adapters, dropout):
    """Every operand keeps its dtype: a layer may return another one than it takes."""
    by_row, num = LAYOUTS["interleaved"]
    exact = _adapters(num, 3, dropout)
    matrices = [each.detach().to(of_adapters).requires_grad_() for each in _operands(exact)]
    x, y = torch.randn(len(by_row), IN).to(of_x), torch.randn(len(by_row), OUT).to(of_y)
    x.requires_grad_()
    y.requires_grad_()
    result = add(y, x, _rebuild(exact, matrices), by_row, seed=range(num))
    assert result.dtype == of_y
    base = torch.zeros(OUT, IN, dtype=torch.float64)
    doubles = _rebuild(exact, [each.double() for each in matrices])
    expected = y.double() + oracle.formula(x.double(), base, None, doubles, by_row, range(num))
    tolerance = max(TOLERANCES.get(each, 0) for each in (of_y, of_x, of_adapters))
    _compare(result, expected, [x, y, *matrices], rtol=tolerance, atol=tolerance * 4)


def _shaped(kind: str) -> torch.Tensor:
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    return {
        "vector": x[0, 0],
        "three dimensions": x,
        "four dimensions": x.view(2, 1, 3, IN),
        "transposed": x.transpose(0, 1),
        "columns apart": torch.randn(3, 2 * IN, dtype=torch.float64)[:, ::2],
        "column-major": torch.randn(IN, 7, dtype=torch.float64).t(),
        "expanded": x[0, :1].expand(5, IN),
        "expanded, three dimensions": x[:1].expand(4, 3, IN),
        "no row": x[:, :0],
        "no batch": x[:0],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "vector",
        "three dimensions",
        "four dimensions",
        "transposed",
        "columns apart",
        "column-major",
        "expanded",
        "expanded, three dimensions",
        "no row",
        "no batch",
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_inputs_of_any_shape_and_stride(oracle, masks_by, kind, dropout):
    x = _shaped(kind).requires_grad_()
    num_rows = x[..., 0].numel()
    (adapter,) = _adapters(1, 3, dropout)
    transposed = torch.randn(IN, OUT, dtype=torch.float64, requires_grad=True)
    expanded = torch.randn(1, dtype=torch.float64).expand(OUT)
    result = linear(x, transposed.t(), expanded, [adapter], seed=[9])
    assert result.shape == (*x.shape[:-1], OUT)
    flat = x.reshape(num_rows, IN)
    expected = oracle.formula(flat, transposed.t(), expanded, [adapter], [0] * num_rows, [9])
    operands = [x, transposed, adapter.down, adapter.up]
    _compare(result, expected.view(result.shape), operands, rtol=0, atol=1e-10)
    y = torch.randn_like(result).transpose(0, -1).contiguous().transpose(0, -1)  # strided
    total = add(y, x, [adapter], seed=[9])
    expected = (expected - torch.nn.functional.linear(flat, transposed.t(), expanded)).view(y.shape)
    torch.testing.assert_close(total, y + expected, rtol=0, atol=1e-10)


def test_layers_without_features():
    """Nothing comes in, or nothing goes out."""
    down, up = torch.randn(2, 0), torch.randn(OUT, 2)
    y = linear(torch.randn(3, 0), torch.randn(OUT, 0), None, [Adapter(down, up)], seed=1)
    assert torch.equal(y, torch.zeros(3, OUT))
    none = Adapter(torch.randn(2, IN), torch.randn(0, 2), dropout=0.1)
    assert linear(torch.randn(3, IN), torch.randn(0, IN), None, [none], seed=1).shape == (3, 0)


def test_matrices_of_any_stride(masks_by):
    """Gradients are contiguous, as the operator's form under the compiler says."""
    down = torch.randn(IN, 3, dtype=torch.float64).t().requires_grad_()
    up = torch.randn(3, OUT, dtype=torch.float64).t().requires_grad_()
    x = torch.randn(9, 4, dtype=torch.float64).t()
    x, weight = torch.randn(IN, 9, dtype=torch.float64).t(), torch.randn(OUT, IN).double()
    x.requires_grad_()
    plain = [each.detach().contiguous().requires_grad_() for each in (x, down, up)]
    y = linear(x, weight, None, [Adapter(down, up, dropout=0.5)], seed=2)
    other = linear(plain[0], weight, None, [Adapter(plain[1], plain[2], dropout=0.5)], seed=2)
    torch.testing.assert_close(y, other, rtol=0, atol=1e-12)
    found = torch.autograd.grad(y.sin().sum(), (x, down, up))
    wanted = torch.autograd.grad(other.sin().sum(), plain)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("trained", [(), ("x",), ("down",), ("up",), ("weight",), ("bias", "up")])
def test_frozen_operands_get_no_gradient(oracle, trained):
    adapter = Adapter(torch.randn(2, IN).double(), torch.randn(OUT, 2).double(), 2.0, 0.4)
    operands = {
        "x": torch.randn(4, IN).double(),
        "weight": torch.randn(OUT, IN).double(),
        "bias": torch.randn(OUT).double(),
        "down": adapter.down,
        "up": adapter.up,
    }
    asked = [operands[name].requires_grad_() for name in trained]
    x, weight, bias = (operands[name] for name in ("x", "weight", "bias"))
    y = linear(x, weight, bias, [adapter], seed=[3])
    assert y.requires_grad == bool(trained)
    if trained:
        _compare(
            y,
            oracle.formula(x, weight, bias, [adapter], [0] * 4, [3]),
            asked,
            rtol=0,
            atol=1e-10,
        )


def _storages_kept(run: Callable[[], torch.Tensor]) -> dict[int, int]:
    """Return the bytes that autograd keeps by the address of their storage."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
        assert y.requires_grad
    return kept


@pytest.mark.parametrize("shape", [(40,), (8, 5)])
@pytest.mark.parametrize("assignment", ["runs", "interleaved"])
@pytest.mark.parametrize("form", [linear, add])
def test_autograd_keeps_the_input_and_the_products_of_rank_r(shape, assignment, form):
    """No mask, no masked or gathered copy; the row numbers are those of the whole step."""
    by_row = [0] * 30 + [1] * 10 if assignment == "runs" else [1, 0, 0, 0] * 10
    rows = AdapterRows.group(by_row, 2)
    adapters = _adapters(2, 2, 0.3, torch.float32, sizes=(64, 32))
    x, weight = torch.randn(*shape, 64, requires_grad=True), torch.randn(32, 64)
    y = torch.randn(*shape, 32)
    seeds = torch.tensor([3, 4])

    def run():
        if form is add:
            return add(y, x, adapters, rows, seed=seeds)
        return linear(x, weight, torch.randn(32), adapters, rows, seed=seeds)

    kept = _storages_kept(run)
    shared = [x, weight, seeds, *_operands(adapters)]
    if rows.order is not None:
        shared.append(rows.order)
    for tensor in shared:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert list(kept.values()) == [4 * (30 * 2 + 10 * 3)]


def _peaks(num_rows: int, size: int, rank: int, by_row: list[int] | None, dtypes, dropout: float):
    """Return the bytes that the products take at their peaks, forward and backward.

    The meter sees what an operator makes only where that is made of operators itself.
    """
    base, of_adapters = dtypes
    num = 1 if by_row is None else 2
    runs = AdapterRows.of_runs([num_rows])
    rows = runs if by_row is None else AdapterRows.group(by_row, num)
    matrices = torch.randn(2, num, size, rank).to(of_adapters)
    uses = uses_of(
        [each.t().contiguous() for each in matrices[0]], list(matrices[1]), rows.order,
        rows.counts, rows.starts, [1.0] * num, [dropout] * num, torch.arange(num),
    )  # fmt: skip
    x, weight, dy = (torch.randn(n, size).to(base) for n in (num_rows, size, num_rows))
    _products.forward(x, weight, None, None, uses)  # builds the library
    forward, _ = measured_peak(lambda: _products.forward(x, weight, None, None, uses))
    _, hidden = _products.forward(x, weight, None, None, uses)
    needs = [True] * num
    backward, _ = measured_peak(
        lambda: _products.backward(
            dy, x, weight, hidden, uses, needs_x=True, needs_down=needs, needs_up=needs
        )
    )
    return forward, backward


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_products_take_tiles_beside_their_results(dropout, interleaved, base):
    """Nothing of M rows and more than r columns: no mask, no gathered or converted matrix."""
    num_rows, size, rank = 4096, 128, 4
    by_row = [0, 1] * (num_rows // 2) if interleaved else None
    forward, backward = _peaks(num_rows, size, rank, by_row, (base, torch.float32), dropout)
    result_bytes = base.itemsize * num_rows * size
    of_rank_r = 4 * num_rows * rank
    tile_bytes = 4 * 512 * (size + rank)
    num_tiles = 1 + 2 * interleaved  # rows of x and y are gathered where they do not follow
    if dropout == 0 and not interleaved and base == torch.float32:
        num_tiles = 0
    elif base != torch.float32:
        num_tiles += 1  # products before they are rounded
    matrices_bytes = 4 * 4 * rank * size + 64
    assert forward <= result_bytes + of_rank_r + num_tiles * tile_bytes + matrices_bytes
    assert backward <= result_bytes + (num_tiles + 1) * tile_bytes + matrices_bytes


def _under_autocast(run: Callable[[], torch.Tensor], dtype=torch.bfloat16) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        return run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["one adapter", "interleaved"])
def test_autocast_has_the_products_in_its_dtype(oracle, layout, dtype):
    by_row, num = LAYOUTS[layout]
    adapters = _adapters(num, 3, 0.3, torch.float32)
    x, weight, bias = torch.randn(len(by_row), IN), torch.randn(OUT, IN), torch.randn(OUT)
    x.requires_grad_()
    y = _under_autocast(lambda: linear(x, weight, bias, adapters, by_row, seed=range(num)), dtype)
    assert y.dtype == dtype
    expected = oracle.formula(x, weight, bias, adapters, by_row, range(num))
    tolerance = 3 * TOLERANCES[dtype]
    _compare(y, expected, [x, *_operands(adapters)], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("of_adapters", [torch.float64, torch.float32])
def test_autocast_leaves_float64_alone(of_adapters):
    """Also the products of float32 adapters, which autocast would otherwise round to 8 bits."""
    adapters = _adapters(1, 3, 0.3, of_adapters)
    x, weight = torch.randn(7, IN).double().requires_grad_(), torch.randn(OUT, IN)
    plain = linear(x, weight, None, adapters, seed=2)
    under = _under_autocast(lambda: linear(x, weight, None, adapters, seed=2))
    assert under.dtype == torch.float64
    assert torch.equal(plain, under)
    operands = [x, *_operands(adapters)]
    wanted = torch.autograd.grad(plain.sum(), operands)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(under.sum(), operands)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_under_autocast_has_the_dtypes_of_the_forward(create_graph):
    adapters = _adapters(2, 3, 0.3, torch.float32)
    x, weight = torch.randn(6, IN, requires_grad=True), torch.randn(OUT, IN, requires_grad=True)
    y = linear(x, weight, None, adapters, [0, 1, 0, 1, -1, 0], seed=2)
    operands = [x, weight, *_operands(adapters)]
    wanted = torch.autograd.grad(y.sum(), operands, retain_graph=True, create_graph=create_graph)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y.sum(), operands, create_graph=create_graph)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_adapter_does_not_feel_its_neighbours(masks_by, dropout):
    """Its addition and gradients have the same bits alone and among others, wherever its rows lie.

    The base's own product has the same rows in both: that of a library may depend on their number.
    """
    sizes, num_rows = (53, 37), 700
    adapters = _adapters(3, 4, 0.2, torch.float32, sizes=sizes)
    mine = Adapter(adapters[0].down, adapters[0].up, 2.0, dropout)
    x, y = torch.randn(num_rows, sizes[0]), torch.randn(num_rows, sizes[1])
    dy = torch.randn(num_rows, sizes[1])

    def results(place: torch.Tensor, num_all: int, of_others: Sequence[Adapter], by_row):
        inputs, totals, gradient = (
            torch.randn(num_all, each.shape[1]).index_copy_(0, place, each) for each in (x, y, dy)
        )
        inputs.requires_grad_()
        number = len(of_others)
        seeds = [*range(50, 50 + number), 7]
        out = add(totals, inputs, [*of_others, mine], by_row, seed=seeds)
        found = torch.autograd.grad(out, (inputs, mine.down, mine.up), gradient)
        return out.detach()[place], found[0][place], *found[1:]

    alone = results(torch.arange(num_rows), num_rows, [], [0] * num_rows)
    places = {
        "after others": torch.arange(num_rows) + 600,
        "interleaved": torch.randperm(1900)
        .sort()
        .values[torch.randperm(1900)[:num_rows].sort().values],
    }
    for name, place in places.items():
        by_row = torch.randint(-1, 2, (1900,))
        by_row[place] = 2
        among = results(place, 1900, adapters[1:], by_row)
        for a, b in zip(alone, among, strict=True):
            assert torch.equal(a, b), name


def test_two_runs_have_the_same_bits():
    adapters = _adapters(2, 4, 0.2, torch.float32, sizes=(70, 40))
    x, weight = torch.randn(1300, 70, requires_grad=True), torch.randn(40, 70)
    by_row = torch.arange(1300) % 3 - 1

    def run():
        y = linear(x, weight, None, adapters, by_row, seed=1)
        return y, *torch.autograd.grad(y.sin().sum(), (x, *_operands(adapters)))

    assert all(map(torch.equal, run(), run()))


def test_numbers_of_an_integer_seed_are_those_of_each_adapter():
    """An adapter's mask depends on its seed and its rows, not on the form of the assignment."""
    adapters = [Adapter(torch.eye(IN), torch.eye(IN), dropout=0.5) for _ in range(2)]
    x, base = torch.ones(8, IN), torch.zeros(IN, IN)
    runs = linear(x, base, None, adapters, [0] * 4 + [1] * 4, seed=3)
    mixed = linear(x, base, None, adapters, [0, 1] * 4, seed=3)
    assert torch.equal(runs, torch.cat([mixed[::2], mixed[1::2]]))
    assert not torch.equal(runs[:4], runs[4:])
    same = linear(x, base, None, adapters, [0] * 4 + [1] * 4, seed=[3, 3])
    assert torch.equal(same[:4], same[4:])
    assert torch.equal(same[:4], runs[:4])


def test_changes_between_forward_and_backward_are_noticed():
    x, weight = torch.randn(4, IN, requires_grad=True), torch.randn(OUT, IN)
    (adapter,) = _adapters(1, 2, 0.5, torch.float32)
    seeds = torch.tensor([3])
    for changed in (adapter.down, seeds):
        y = linear(x * 1, weight, None, [adapter], seed=seeds)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("layout", ["one adapter", "interleaved", "empty adapters", "no adapter"])
@pytest.mark.parametrize("trained_layer", [False, True])
def test_operations_are_those_of_the_formula(oracle, layout, trained_layer):
    by_row, num = LAYOUTS[layout]
    adapters, seeds = _adapters(num, 3, 0.5), list(range(num))
    x = torch.randn(len(by_row), IN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(OUT, IN, dtype=torch.float64, requires_grad=trained_layer)
    counts = []
    for run in (
        lambda: linear(x, weight, None, adapters, by_row, seed=seeds),
        lambda: oracle.formula(x, weight, None, adapters, by_row, seeds),
    ):
        with FlopCounterMode(display=False) as forward:
            y = run()
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    assert counts[0] == counts[1]
    assert all(counts[0])


def _errors() -> list[tuple[str, type[Exception], str, Callable[[], object]]]:
    x, weight, bias = torch.randn(4, IN), torch.randn(OUT, IN), torch.randn(OUT)
    adapter, other = _adapters(2, 2, 0.0, torch.float32)

    def call(x=x, weight=weight, bias=bias, adapters=(adapter,), assignment=None, seed=1):
        return lambda: linear(x, weight, bias, adapters, assignment, seed=seed)

    narrow = Adapter(torch.randn(2, IN - 1), torch.randn(OUT, 2))
    far = Adapter(torch.randn(2, IN, device="meta"), torch.randn(OUT, 2, device="meta"))
    two = (adapter, other)
    value, kind = ValueError, TypeError
    return [
        ("x of no dimension", value, "x has no dimension", call(x=torch.tensor(1.0))),
        ("x of integers", kind, "x has the dtype torch.int64", call(x=x.long())),
        ("x is a list", kind, "x is of the type list", call(x=[1.0])),
        ("weight narrow", value, r"weight has the shape \(5, 5\)", call(weight=weight[:, 1:])),
        ("weight flat", value, "weight has the shape", call(weight=weight[0])),
        ("weight int8", kind, "weight has the dtype torch.int8.*`add`", call(weight=weight.char())),
        ("weight afar", value, "weight is on meta and x", call(weight=weight.to("meta"))),
        ("weight is None", kind, "weight is of the type NoneType", call(weight=None)),
        ("bias short", value, r"bias has the shape \(1,\)", call(bias=bias[:1])),
        ("bias a matrix", value, r"bias has the shape \(4, 5\)", call(bias=bias.expand(4, OUT))),
        ("bias elsewhere", value, "bias is on meta", call(bias=bias.to("meta"))),
        ("an adapter alone", kind, r"\[adapter\]", call(adapters=adapter)),
        ("other features", value, r"adapters\[1\] is for 5 .* 6 and 5",
         call(adapters=(adapter, narrow), assignment=[0] * 4)),
        ("adapter elsewhere", value, r"adapters\[0\] is on meta", call(adapters=(far,))),
        ("no assignment", value, "assignment is None with 2", call(adapters=two)),
        ("no adapter, no assignment", value, "assignment is None with 0", call(adapters=())),
        ("assignment short", value, "is for 3 rows .* x has 4", call(assignment=[0] * 3)),
        ("rows of other adapters", value, "2 adapters; x",
         call(assignment=AdapterRows.of_runs([2, 2]))),
        ("adapter does not exist", value, "number 1;", call(assignment=[0, 0, 1, 0])),
        ("assignment of floats", kind, "assignment .* integers", call(assignment=[0.0] * 4)),
        *[
            (f"seed {seed}", kind, "seed is", call(seed=seed))
            for seed in (1.7, None, True, "7", [1.0], [True], [None], {3})
        ],
        ("seeds missing", value, "seed has 1 numbers for 2",
         call(adapters=two, assignment=[0] * 4, seed=[1])),
        ("seeds too many", value, "seed has 2 numbers for 1", call(seed=torch.tensor([1, 2]))),
        ("seed of floats", kind, "seed is a tensor of torch.float32", call(seed=torch.ones(1))),
        ("seed without a dimension", kind, "seed is a tensor", call(seed=torch.tensor(1))),
        ("y of other rows", value, r"y has the shape \(3, 5\)",
         lambda: add(torch.randn(3, OUT), x, [adapter], seed=1)),
        ("y of no dimension", value, r"y has the shape \(\)",
         lambda: add(torch.tensor(1.0), x[0], [adapter], seed=1)),
        ("y of integers", kind, "y has the dtype",
         lambda: add(torch.ones(4, OUT, dtype=torch.int64), x, [adapter], seed=1)),
        ("y elsewhere", value, "y is on meta",
         lambda: add(torch.randn(4, OUT, device="meta"), x, [adapter], seed=1)),
        ("y of other features", value, r"adapters\[0\] is for",
         lambda: add(torch.randn(4, OUT + 1), x, [adapter], seed=1)),
    ]  # fmt: skip


@pytest.mark.parametrize("case", _errors(), ids=lambda case: case[0])
def test_arguments_that_are_refused(case):
    _, kind, message, run = case
    with pytest.raises(kind, match=message):
        run()


def test_seeds_of_numpy_and_of_tensors_are_integers():
    np = pytest.importorskip("numpy")
    adapters = _adapters(2, 2, 0.5)
    x, weight = torch.randn(4, IN).double(), torch.randn(OUT, IN).double()
    rows = AdapterRows.of_runs([2, 2])
    expected = linear(x, weight, None, adapters, rows, seed=[3, -4])
    for seeds in (
        np.array([3, -4]),
        [np.int64(3), np.int32(-4)],
        (3, 2**64 - 4),
        torch.tensor([3, -4]),
        range(3, -11, -7),
    ):
        assert torch.equal(linear(x, weight, None, adapters, rows, seed=seeds), expected)
    one = linear(x, weight, None, adapters, rows, seed=3)
    assert torch.equal(linear(x, weight, None, adapters, rows, seed=np.int64(3)), one)
    assert torch.equal(linear(x, weight, None, adapters, rows, seed=3 + 2**64), one)
    assert torch.equal(linear(x, weight, None, adapters, rows, seed=3 - 2**70), one)


def test_seeds_without_a_difference_in_64_bits_only_are_the_same():
    seeds = [0, 1, 2**32, 2**63, -1]
    adapters = [Adapter(torch.eye(IN), torch.eye(IN), dropout=0.5)]
    x, base = torch.ones(16, IN), torch.zeros(IN, IN)
    results = [linear(x, base, None, adapters, seed=seed) for seed in seeds]
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("trained", ["x", "up"])
@pytest.mark.parametrize("form", [linear, add])
def test_an_input_that_no_gradient_has_in_it_is_not_kept(trained, form):
    """As in layers of PEFT whose adapters, or whose matrices A (LoRA-FA), are frozen."""
    x, weight, y = torch.randn(40, 64), torch.randn(32, 64), torch.randn(40, 32)
    adapter = Adapter(torch.randn(2, 64), torch.randn(32, 2), dropout=0.3)
    asked = {"x": x, "up": adapter.up}[trained].requires_grad_()
    seeds = torch.tensor([3])

    def run():
        if form is add:
            return add(y, x, [adapter], seed=seeds)
        return linear(x, weight, None, [adapter], seed=seeds)

    kept = _storages_kept(run)
    assert x.untyped_storage().data_ptr() not in kept
    frozen = (weight, adapter.down, adapter.up, seeds)
    kept = set(kept) - {each.untyped_storage().data_ptr() for each in frozen}
    assert len(kept) == 2  # S and one element for x
    (found,) = torch.autograd.grad(run().sin().sum(), asked)
    adapter.down.requires_grad_()
    (wanted,) = torch.autograd.grad(run().sin().sum(), asked)
    assert torch.equal(found, wanted)


def test_gradients_of_gradients_with_a_frozen_adapter():
    x = torch.randn(4, IN, dtype=torch.float64, requires_grad=True)
    adapter = Adapter(torch.randn(2, IN).double(), torch.randn(OUT, 2).double(), 2.0, 0.4)
    weight = torch.randn(OUT, IN, dtype=torch.float64)
    assert gradgradcheck(lambda x: linear(x, weight, None, [adapter], seed=3).sin(), (x,))
    adapter.up.requires_grad_()
    loss = linear(x, weight, None, [adapter], seed=3).sin().sum()
    with pytest.raises(RuntimeError, match="let the matrices A require gradients"):
        torch.autograd.grad(loss, (x, adapter.up), create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_shapes_of_the_meta_device(dropout):
    adapter = Adapter(
        torch.empty(2, IN, device="meta", requires_grad=True),
        torch.empty(OUT, 2, device="meta", requires_grad=True),
        dropout=dropout,
    )
    x = torch.empty(4, IN, device="meta", requires_grad=True)
    y = linear(x, torch.empty(OUT, IN, device="meta"), None, [adapter], seed=3)
    y.sum().backward()
    assert (y.shape, y.device.type) == ((4, OUT), "meta")
    assert x.grad is not None and x.grad.shape == x.shape
