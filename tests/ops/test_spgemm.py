"""Products of sparse matrices are those of dense ones, in values, patterns and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.ops import product_pattern, spgemm
from penstock.ops.sparse import _native, _rows, _torch
from penstock.ops.sparse._operands import read_operand
from penstock.ops.sparse._operator import spgemm_gradients, spgemm_pattern, spgemm_values

TOLERANCES = {  # of norms, relative: sums of tens of products
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,  # 11 bits of the result
    torch.bfloat16: 1e-2,  # 8 bits
}


@pytest.fixture(params=["C++", "torch"])
def path(request, monkeypatch) -> str:
    """Both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "_library", lambda: None)
    return request.param


def draw(
    num_rows: int,
    num_columns: int,
    density: float,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    index: torch.dtype = torch.int64,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    is_stored = torch.rand(num_rows, num_columns, generator=generator) < density
    values = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    return compress((is_stored * values).to(dtype), index)


def compress(dense: Tensor, index: torch.dtype = torch.int64) -> Tensor:
    csr = dense.to_sparse_csr()
    offsets, columns = csr.crow_indices().to(index), csr.col_indices().to(index)
    return torch.sparse_csr_tensor(offsets, columns, csr.values(), dense.shape)


def stored(matrix: Tensor) -> Tensor:
    """Return which entries are stored, also where they are 0."""
    ones = torch.ones_like(matrix.values(), dtype=torch.float64)
    if matrix.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(matrix.indices(), ones, matrix.shape).to_dense() > 0
    return (
        torch.sparse_csr_tensor(
            matrix.crow_indices().long(), matrix.col_indices().long(), ones, matrix.shape
        ).to_dense()
        > 0
    )


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1.0))


def check(a: Tensor, b: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    """Compare a product and its gradients with those of dense matrices."""
    a, b = (each.detach().requires_grad_() for each in (a, b))
    dense = [each.detach().to_dense().double().requires_grad_() for each in (a, b)]
    expected = dense[0] @ dense[1]
    pattern = stored(a).double() @ stored(b).double() > 0
    if mask is not None:
        pattern &= stored(mask)
        expected = expected * pattern
    c = spgemm(a, b, mask=mask, **options)
    tolerance = TOLERANCES[a.dtype]
    assert torch.equal(stored(c), pattern)
    assert c.values().numel() == int(pattern.sum())
    if c.layout == torch.sparse_csr:
        for first, end in zip(c.crow_indices()[:-1], c.crow_indices()[1:], strict=True):
            assert (c.col_indices()[first:end].diff() > 0).all()
    assert error(c.to_dense(), expected) < tolerance
    dc = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).double()
    grads = torch.autograd.grad(c.to_dense(), (a, b), dc.to(a.dtype))
    for grad, of, exact in zip(
        grads, (a, b), torch.autograd.grad(expected, dense, dc.to(a.dtype).double()), strict=True
    ):
        assert torch.equal(stored(grad), stored(of)) and grad.dtype == of.dtype
        assert grad.values().numel() == of.values().numel()
        assert error(grad.to_dense(), exact * stored(of)) < 4 * tolerance
    return c.detach()


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 300)),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(["C++", "torch"]),
    st.integers(0, 9),
)
def test_products_are_those_of_dense_matrices(shape, density, has_mask, index, path, seed):
    rows, inner, columns = shape
    a = draw(rows, inner, density, seed, index=index)
    b = draw(inner, columns, min(density, 0.5), seed + 1, index=index)
    mask = draw(rows, columns, 0.4, seed + 2) if has_mask else None
    with pytest.MonkeyPatch.context() as patch:
        if path == "torch":
            patch.setattr(_native, "_library", lambda: None)
        check(a, b, mask)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_and_index(path: str, dtype: torch.dtype):
    for index in (torch.int32, torch.int64):
        a = draw(20, 30, 0.3, dtype=dtype, index=index)
        b = draw(30, 400, 0.2, 1, dtype=dtype)
        c = check(a, b)
        assert c.dtype == dtype and c.col_indices().dtype == torch.int64
        square = draw(20, 20, 0.3, dtype=dtype, index=index)
        assert check(square, square).col_indices().dtype == index


def test_columns_in_windows_have_the_same_bits(path: str):
    """Of 20,000 columns, which a budget of a byte cuts into windows of 4096 and rows into one."""
    a, b = draw(9, 40, 0.5), draw(40, 20_000, 0.01, 1)
    dense = draw(9, 20_000, 0.3, 2)
    for mask in (None, dense):
        whole, cut = check(a, b, mask), check(a, b, mask, max_bytes=1)
        assert torch.equal(whole.values(), cut.values())
        assert torch.equal(whole.col_indices(), cut.col_indices())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(300, 5, 40), (64, 300, 300), (40, 9, 2**27 + 9)])
def test_rows_of_few_products_have_the_bits_of_others(shape, index: torch.dtype):
    """Of at most 16 they are sorted in a register, and those that meet in a column are added up."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(3)

    def draw_rows(count: int, most: int, width: int) -> Tensor:
        lengths = torch.randint(0, most + 1, (count,), generator=generator)
        row = torch.arange(count).repeat_interleave(lengths)
        column = torch.randint(max(0, width - 40), width, (len(row),), generator=generator)
        values = torch.randn(len(row), generator=generator)
        matrix = torch.sparse_coo_tensor(torch.stack([row, column]), values, (count, width))
        return matrix.coalesce().to_sparse_csr()

    a, b = draw_rows(rows, 4, inner), draw_rows(inner, 6, columns)
    a, b = (
        torch.sparse_csr_tensor(
            *(each.crow_indices().to(index), each.col_indices().to(index), each.values()),
            each.shape,
        ).requires_grad_()
        for each in (a, b)
    )
    pattern = product_pattern(a, b)
    found, known = spgemm(a, b), spgemm(a, b, pattern=pattern)
    products = b.crow_indices().diff()[a.col_indices().long()]
    assert len(pattern.columns) < int(products.sum()) and int(products.max()) > 0
    assert torch.equal(found.col_indices(), known.col_indices())
    assert torch.equal(found.values(), known.values())
    generator = torch.Generator().manual_seed(4)
    dc = torch.sparse_csr_tensor(
        *(found.crow_indices(), found.col_indices()),
        torch.randn(len(pattern.columns), generator=generator),
        found.shape,
    )
    grads = torch.autograd.grad(found, (a, b), dc)
    values = [each.detach().values().double() for each in (a, b)]
    product = _rows.KnownProduct(*pattern._rows, *values, False, pattern.max_bytes)
    exact = _torch.differentiate(product, dc.values().double())
    for each, wanted in zip(grads, exact, strict=True):
        assert error(each.values(), wanted) < TOLERANCES[torch.float32]


def test_two_hop_neighbourhoods_of_one_matrix_get_both_gradients(path: str):
    a = draw(40, 40, 0.1).requires_grad_()
    dense = a.detach().to_dense().requires_grad_()
    dc = torch.randn(40, 40, dtype=torch.float64)
    (grad,) = torch.autograd.grad(spgemm(a, a).to_dense(), a, dc)
    (exact,) = torch.autograd.grad(dense @ dense, dense, dc)
    assert torch.equal(grad.col_indices(), a.col_indices())
    assert torch.allclose(grad.to_dense(), exact * stored(a), rtol=0, atol=1e-12)
    triangles = spgemm(a, a, mask=a)
    expected = (dense @ dense).detach() * stored(a)
    assert torch.allclose(triangles.to_dense(), expected, rtol=0, atol=1e-13)


def test_coo_comes_back_coalesced(path: str):
    a, b = draw(20, 30, 0.2).to_sparse_coo(), draw(30, 25, 0.2, 1).to_sparse_coo()
    c = check(a, b)
    assert c.layout == torch.sparse_coo and c.is_coalesced()
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (2, 2)
    )
    assert torch.equal(spgemm(twice, twice).to_dense(), torch.tensor([[8.0, 0], [0, 8.0]]))


def test_unsorted_and_repeated_columns_are_sums_with_a_gradient_each(path: str):
    offsets, columns = torch.tensor([0, 3, 3, 5]), torch.tensor([2, 0, 2, 1, 0])
    values = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    a = torch.sparse_csr_tensor(offsets, columns, values, (3, 3)).requires_grad_()
    dense = torch.tensor([[2.0, 0, 4], [0, 0, 0], [5, 4, 0]], dtype=torch.float64)
    b = draw(3, 50, 0.6)
    c = spgemm(a, b)
    assert torch.allclose(c.to_dense(), dense @ b.to_dense(), rtol=0, atol=1e-14)
    dc = torch.randn(3, 50, dtype=torch.float64)
    (grad,) = torch.autograd.grad(c.to_dense(), a, dc)
    exact = dc @ b.to_dense().T
    assert torch.equal(grad.col_indices(), columns)
    rows = torch.tensor([0, 0, 0, 2, 2])
    assert torch.allclose(grad.values(), exact[rows, columns], rtol=0, atol=1e-13)
    of_torch = torch.sparse.mm(draw(30, 30, 0.2), draw(30, 30, 0.2, 1))  # its rows are unsorted
    check(of_torch, b=draw(30, 20, 0.3))


def test_a_pattern_is_used_again_and_never_for_other_operands(path: str):
    a, b = draw(20, 30, 0.2), draw(30, 25, 0.2, 1)
    for mask in (None, draw(20, 25, 0.3, 2)):
        pattern = product_pattern(a, b, mask=mask)
        first, again = spgemm(a, b, mask=mask), spgemm(2 * a, b, pattern=pattern)
        assert torch.equal(2 * first.values(), again.values())
        assert torch.equal(first.col_indices(), again.col_indices())
    assert pattern.shape == (20, 25)
    with pytest.raises(ValueError, match="pattern is of another b"):
        spgemm(a, draw(30, 25, 0.2, 3), pattern=pattern)
    with pytest.raises(ValueError, match="pattern is of another a"):
        spgemm(draw(20, 30, 0.3), b, pattern=pattern)
    with pytest.raises(ValueError, match="pass mask to product_pattern"):
        spgemm(a, b, mask=mask, pattern=pattern)
    with pytest.raises(ValueError, match="a value for each"):
        pattern.multiply(a.values()[1:], b.values())
    with pytest.raises(TypeError, match="must have one"):
        pattern.multiply(a.values().float(), b.values())


def test_a_pattern_is_used_with_entries_in_any_order(path: str):
    """The values of an operand are in the order of its own entries, not of the pattern's."""
    sorted_a, b = draw(9, 8, 0.5), draw(8, 7, 0.4, 1)
    rows = torch.repeat_interleave(torch.arange(9), sorted_a.crow_indices().diff())
    order = torch.argsort(8 * rows - sorted_a.col_indices())  # backwards in each row
    a = torch.sparse_csr_tensor(
        sorted_a.crow_indices(), sorted_a.col_indices()[order], sorted_a.values()[order], (9, 8)
    )
    for each, other in ((a, sorted_a), (sorted_a, a)):
        operand, expected = (each.detach().requires_grad_() for _ in range(2))
        found = spgemm(operand, b, pattern=product_pattern(other, b))
        torch.testing.assert_close(found.to_dense(), other.to_dense() @ b.to_dense())
        found.values().sum().backward()
        spgemm(expected, b).values().sum().backward()
        assert torch.equal(operand.grad.values(), expected.grad.values())


def test_lazily_negated_gradients_are_read_so(path: str):
    a = draw(9, 8, 0.5).requires_grad_()
    found = spgemm(a, draw(8, 7, 0.4, 1)).to_dense()
    gradient = torch.rand(found.shape, dtype=found.dtype)
    (of_lazy,) = torch.autograd.grad(found, a, torch._neg_view(-gradient), retain_graph=True)
    (of_plain,) = torch.autograd.grad(found, a, gradient)
    assert torch.equal(of_lazy.values(), of_plain.values())


def test_gradients_are_those_of_differences(path: str):
    a, b = draw(6, 7, 0.4), draw(7, 9, 0.4, 1)
    for mask in (None, draw(6, 9, 0.5, 2)):
        pattern = product_pattern(a, b, mask=mask)
        values = [each.values().clone().requires_grad_() for each in (a, b)]
        assert torch.autograd.gradcheck(pattern.multiply, values)
    out = pattern.multiply(*values)
    (dleft,) = torch.autograd.grad(out.sum(), values[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        dleft.sum().backward()


def differentiate_twice(total: Tensor, a: Tensor) -> None:
    (grad,) = torch.autograd.grad(total, a, create_graph=True)
    grad.coalesce().values().sum().backward()


def test_second_derivatives_are_refused_in_every_layout(path: str):
    """torch drops the graph of a gradient in CSR: what follows would be a constant, in silence."""
    for matrix in (draw(6, 6, 0.4), draw(6, 6, 0.4).to_sparse_coo()):
        a = matrix.detach().requires_grad_()
        for options in ({}, {"pattern": product_pattern(a, a)}):
            total = spgemm(a, a, **options).to_dense().square().sum()
            with pytest.raises(RuntimeError, match="no gradient of its own"):
                differentiate_twice(total, a)


def test_second_derivatives_of_the_values_of_a_matrix_are_refused(path: str):
    made = draw(6, 6, 0.4).to_sparse_coo().coalesce()
    values = made.values().clone().requires_grad_()
    a = torch.sparse_coo_tensor(made.indices(), values, made.shape, is_coalesced=True)
    total = spgemm(a, made).to_dense().square().sum()
    with pytest.raises(RuntimeError, match="no gradient of its own: leave create_graph out"):
        torch.autograd.grad(total, values, create_graph=True)
    spgemm(2 * a, made).to_dense().sum().backward()
    assert values.grad is not None


def test_bits_do_not_depend_on_threads():
    a, b = (draw(60, 60, density, seed).float() for density, seed in ((0.3, 0), (0.9, 1)))
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            given = [each.detach().requires_grad_() for each in (a, b)]
            c = spgemm(*given)
            grads = torch.autograd.grad(c.to_dense(), given, torch.ones(60, 60))
            results.append([c.values(), *(each.values() for each in grads)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_the_operators_keep_the_rules_of_torch(path: str):
    pattern = product_pattern(draw(6, 7, 0.4), draw(7, 9, 0.4, 1))
    rows = (pattern.left, pattern.right, pattern.result)
    indices = [each for of in rows for each in (of.offsets, of.columns)]
    values = [torch.rand(len(of.columns), requires_grad=True) for of in rows]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*values[:2], indices, 9, False, 1000)
    torch.library.opcheck(spgemm_values, arguments, test_utils=tests)
    arguments = (values[2], *values[:2], indices, 9, False, 1000)
    detached = tuple(each.detach() if isinstance(each, Tensor) else each for each in arguments)
    torch.library.opcheck(spgemm_gradients, detached, test_utils=tests)
    torch.library.opcheck(spgemm_pattern, (indices[:4], 9, 1000), test_utils=tests)


def test_compiled_graphs_have_the_values_whole(path: str):
    """torch.compile takes no sparse tensors: of a pattern all tensors are dense."""
    a, b = draw(6, 7, 0.4), draw(7, 9, 0.4, 1)
    pattern = product_pattern(a, b)

    def run(left: Tensor, right: Tensor) -> Tensor:
        return pattern.multiply(left * 2, right).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = [each.values().clone().requires_grad_() for each in (a, b)]
    out, expected = compiled(*given), run(*given)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), given)
    for each, wanted in zip(grads, torch.autograd.grad(expected.sum(), given), strict=True):
        assert torch.equal(each, wanted)


@pytest.mark.slow
def test_compiled_functions_may_build_sparse_tensors(path: str):
    """The graph breaks there, and neither `spgemm` nor what it calls is traced in pieces."""
    b = draw(3, 4, 0.8, 1)

    def run(values: Tensor) -> Tensor:
        a = torch.sparse_csr_tensor(
            torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), values, (2, 3)
        )
        pattern = product_pattern(a, b)
        return spgemm(a, b).values() + spgemm(2 * a, b, pattern=pattern).values()

    values = torch.randn(3, dtype=b.dtype, requires_grad=True)
    out, expected = torch.compile(run, backend="aot_eager")(values), run(values)
    assert torch.equal(out, expected)
    (grad,), (wanted,) = (torch.autograd.grad(each.sum(), values) for each in (out, expected))
    assert torch.equal(grad, wanted)


def malformed(offsets: list[int], columns: list[int]) -> Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor(offsets), torch.tensor(columns), torch.ones(len(columns)), (2, 2),
        check_invariants=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda a: (a.to_dense(), a), TypeError, "a is torch.strided"),
        (lambda a: (a, [1.0]), TypeError, "b is list"),
        (lambda a: (a, a.to(torch.int32)), TypeError, "b has the dtype"),
        (lambda a: (a, a.double()), TypeError, "convert one of them"),
        (lambda a: (a, draw(3, 2, 1.0).float()), ValueError, "columns of a must be as many"),
        (lambda a: (malformed([0, 2, 1], [0, 1]), a), ValueError, "do not rise"),
        (lambda a: (malformed([1, 1, 2], [0, 1]), a), ValueError, "do not rise"),
        (lambda a: (a, malformed([0, 1, 2], [0, 2])), ValueError, "columns outside"),
        (lambda a: (a, malformed([0, 1, 2], [-1, 1])), ValueError, "columns outside"),
    ],
)
def test_operands_that_do_not_fit_are_refused(path: str, change, kind, message: str):
    a = draw(2, 2, 1.0).float()
    with pytest.raises(kind, match=message):
        spgemm(*change(a))


def test_masks_and_budgets_that_do_not_fit_are_refused():
    a = draw(2, 2, 1.0)
    with pytest.raises(ValueError, match="mask has the shape"):
        spgemm(a, a, mask=draw(2, 3, 1.0))
    with pytest.raises(ValueError, match="max_bytes is 0"):
        spgemm(a, a, max_bytes=0)


def test_more_entries_than_indices_count_are_refused(path: str, monkeypatch):
    monkeypatch.setitem(_rows.MOST_INDEX, torch.int32, 200)
    a, b = draw(20, 9, 0.9, index=torch.int32), draw(9, 20, 0.9, index=torch.int32)
    with pytest.raises(ValueError, match="build the operands with int64 indices"):
        spgemm(a, b)
    assert spgemm(draw(20, 9, 0.9), draw(9, 20, 0.9)).values().numel() > 200


def test_more_columns_than_have_a_number_of_32_bits_are_refused():
    a = torch.sparse_csr_tensor([0, 1], [2**31], [1.0], (1, 2**31 + 1))
    with pytest.raises(ValueError, match="at most 2147483647 rows and columns"):
        read_operand("a", a)


def test_numbers_that_are_none_stay_in_their_row(path: str):
    a, b = draw(4, 5, 1.0), draw(5, 6, 1.0, 1)
    a.values()[7] = torch.nan
    c = spgemm(a, b).to_dense()
    assert bool(c[1].isnan().all()) and bool(c[[0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_gradients_of_a_product_of_many_rows_are_never_dense(layout: torch.layout):
    number, places = 1_000_000, torch.tensor([0, 7, 999_999])  # dense it is 4 TB
    values = torch.tensor([1.0, 2.0, 3.0])
    a = torch.sparse_coo_tensor(
        torch.stack([places, places]), values, (number, number), is_coalesced=True
    )
    a = a.requires_grad_() if layout == torch.sparse_coo else a.to_sparse_csr().requires_grad_()
    c = spgemm(a, a)
    (found,) = torch.autograd.grad(c, a, c.detach())
    torch.testing.assert_close(found.values(), 2 * values**3)


def test_gradients_of_other_patterns_are_read_where_the_product_is():
    a, b = (draw(9, 9, 0.4, seed).requires_grad_() for seed in (0, 1))
    c = spgemm(a, b)
    given = draw(9, 9, 0.5, 2)
    operands = (a, b)
    found = torch.autograd.grad(c, operands, given, retain_graph=True)
    expected = torch.autograd.grad(c, operands, given.to_dense())
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.values(), wanted.values())


def test_values_on_other_devices_are_refused_and_never_read():
    eye, values = torch.eye(3).to_sparse_csr(), torch.rand(3)
    pattern = product_pattern(eye, eye)
    with pytest.raises(ValueError, match="left_values on cpu, right_values on meta"):
        pattern.multiply(values, values.to("meta"))
    with pytest.raises(ValueError, match="left_values on meta, right_values on cpu"):
        pattern.multiply(values.to("meta"), values)


def test_a_budget_beside_a_pattern_is_that_of_the_call():
    eye = torch.eye(3).to_sparse_csr()
    pattern = product_pattern(eye, eye)
    assert torch.equal(spgemm(eye, eye, pattern=pattern, max_bytes=1).values(), torch.ones(3))
    with pytest.raises(ValueError, match="max_bytes is 0"):
        spgemm(eye, eye, pattern=pattern, max_bytes=0)
