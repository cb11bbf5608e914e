"""Run by `test_triton_sparse_deform.py` in a process of its own, where Triton interprets kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_bytes.deform import DeformBytes
from kernel_bytes.sampling import count_sampling
from penstock.codegen import ByteCount, TritonLaunch, count_bytes
from penstock.ops import product_pattern, spgemm
from penstock.ops.deform import _operator as deform_operator
from penstock.ops.deform import _torch as deform_torch
from penstock.ops.deform import deform_conv2d
from penstock.ops.deform import triton as deform
from penstock.ops.deform._shapes import DeformGeometry, DeformInputs
from penstock.ops.sparse import _operator as sparse_operator
from penstock.ops.sparse import _torch as sparse_torch
from penstock.ops.sparse import triton as sparse
from penstock.ops.sparse._rows import KnownProduct
from penstock.ops.sparse.triton._launch import plan_gradients, plan_values
from test_deform import CASE, operands
from test_spgemm import draw

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton_sparse_deform.py runs this"

FLOAT, HALF = torch.float32, torch.float16
TOLERANCES = {FLOAT: 3e-6, HALF: 3e-3}
"""Of norms, relative: sums of some hundred products; columns are rounded to 11 bits."""


pytestmark = pytest.mark.usefixtures("interpreter_of_triton")


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    least = max(0.1 * expected.numel() ** 0.5, 1e-30)  # of no numbers the error is 0
    return float((found - expected).norm() / expected.norm().clamp(min=least))


# ------------------------------------------------------------------------- sparse


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(20, 30, 200, 0.2), (9, 7, 5, 0.9), (4, 3, 6, 0.0)])
def test_products_and_their_bytes(shape, index: torch.dtype, has_mask: bool):
    rows, inner, columns, density = shape
    a = draw(rows, inner, density, index=index)
    b = draw(inner, columns, density, 1, index=index)
    mask = draw(rows, columns, 0.4, 2, index=index) if has_mask else None
    pattern = product_pattern(a, b, mask=mask)
    values = (a.values(), b.values())
    exact_product, product = (
        KnownProduct(*pattern._rows, *of, has_mask, 1000)
        for of in (values, [each.float() for each in values])
    )
    counts: list[ByteCount] = []

    def run(each: TritonLaunch) -> None:
        counts.append(count_bytes(each))

    found = sparse.multiply(product, run=run)
    expected = sparse_torch.multiply(exact_product)
    assert error(found, expected) < TOLERANCES[FLOAT]
    dvalues = torch.randn(len(found), dtype=torch.float64)
    grads = sparse.differentiate(product, dvalues.float(), run=run)
    exact = sparse_torch.differentiate(exact_product, dvalues)
    for each, wanted in zip(grads, exact, strict=True):
        assert error(each, wanted) < TOLERANCES[FLOAT]
    pairs = (a.to_dense() != 0).float() @ (b.to_dense() != 0).float()
    num_found = int(pairs.sum() if mask is None else (pairs * (mask.to_dense() != 0)).sum())
    samplings = [plan_values(product), *plan_gradients(product, dvalues.float())]
    for sampling, counted in zip(samplings, counts, strict=True):
        if len(sampling.pattern.columns):
            assert counted == count_sampling(sampling, num_found)


def test_the_operator_of_products_takes_the_kernel(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: the pattern by torch, values and gradients by the kernel."""
    a, b = (draw(9, 9, 0.4, seed).float().requires_grad_() for seed in (0, 1))
    expected = spgemm(a, b)
    exact = torch.autograd.grad(expected.to_dense().sum(), (a, b))
    monkeypatch.setattr(sparse_operator, "kernels_for", lambda _: sparse)
    found = spgemm(a, b)
    assert torch.equal(found.col_indices(), expected.col_indices())
    assert error(found.values().detach(), expected.values().detach()) < TOLERANCES[FLOAT]
    for each, wanted in zip(
        torch.autograd.grad(found.to_dense().sum(), (a, b)), exact, strict=True
    ):
        assert error(each.values(), wanted.values()) < TOLERANCES[FLOAT]


# ------------------------------------------------------------------------- deform

CASES = {
    "whole": {"batch": 1, "channels": 20, "size": [4, 5]},
    "groups": {"batch": 1, "channels": 8, "outs": 6, "groups": 2, "offset_groups": 4,
               "size": [4, 4]},
    "offsets across groups": {"batch": 1, "channels": 6, "outs": 3, "groups": 3,
                              "offset_groups": 2, "size": [3, 4], "has_mask": False},
    "depthwise": {"batch": 1, "channels": 3, "outs": 3, "groups": 3, "offset_groups": 1,
                  "size": [4, 4], "has_bias": False},
    "no padding": {"channels": 5, "outs": 70, "offset_groups": 1, "kernel": (1, 2), "size": [4, 5],
                   "geometry": DeformGeometry(stride=(2, 1), padding=(0, 0), dilation=(1, 2))},
    "halo": {"batch": 1, "channels": 6, "offset_groups": 2, "size": [5, 6],
             "geometry": DeformGeometry(stride=(1, 1), padding=(1, 0), dilation=(1, 2), reach=1)},
    "halo with strides": {"batch": 2, "channels": 4, "outs": 4, "groups": 2, "has_mask": False,
                          "kernel": (2, 3), "size": [6, 9],
                          "geometry": DeformGeometry(stride=(3, 2), padding=(0, 2),
                                                     dilation=(2, 1), reach=2)},
    "large halo": {"channels": 3, "offset_groups": 1, "size": [3, 4],
                   "geometry": DeformGeometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1),
                                              reach=12)},
}  # fmt: skip


def prepare(name: str, dtype: torch.dtype) -> tuple[DeformInputs, Tensor]:
    """Return operands as kernels take them, and a gradient of the output."""
    case = {**CASE, **CASES[name]}
    x, offset, weight, bias, mask = (
        None if each is None else each.detach() for each in operands(case, dtype)
    )
    assert x is not None and offset is not None and weight is not None
    reach = case["geometry"].reach
    if reach is not None:  # not on pixels, where a corner has no share
        offset = offset.clamp(0.125 - reach, reach - 0.125)
    given = DeformInputs(x, offset, weight, bias, mask, case["geometry"]).in_sums()
    shape = given.new_output().shape
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return given, dout.to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, FLOAT) for name in CASES), ("whole", HALF), ("halo", HALF)]
)
def test_convolutions_and_their_bytes(name: str, dtype: torch.dtype):
    given, dout = prepare(name, dtype)
    tensors = [None if each is None else each.double() for each in given[:5]]
    exact = DeformInputs(*tensors, given.geometry)
    results: list[Any] = []

    def run() -> None:
        results.append(deform.forward(given))

    counted = count_bytes(run)
    bytes_of = DeformBytes(given, num_windows=2)
    assert counted == bytes_of.forward()
    expected = deform_torch.forward(exact)
    assert error(results[0], expected) < TOLERANCES[dtype]
    wanted = deform_torch.backward(dout.double(), exact)
    x, weight = given.x, given.weight
    pixels = dout.shape[2] * dout.shape[3]
    column = x.shape[1] * weight.shape[2] * weight.shape[3] * x.element_size()
    window = -(-pixels // 2) * column

    def differentiate() -> None:
        results.append(deform.backward(dout, given, window_bytes=window))

    counted = count_bytes(differentiate)
    assert counted == bytes_of.backward()
    again = results[1]
    if dtype == FLOAT:  # what runs is the same for each
        again = deform.backward(dout, given, window_bytes=window)
    for found, same, each in zip(results[1], again, wanted, strict=True):
        assert found is None or (same is not None and torch.equal(found, same))
        assert (found is None) == (each is None)
        if found is not None:
            assert error(found, each) < TOLERANCES[dtype]


def test_offsets_that_are_none_have_no_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deform_operator, "kernels_for", lambda _: deform)
    x, weight = torch.randn(1, 3, 6, 7, requires_grad=True), torch.randn(2, 3, 1, 1)
    offset = torch.zeros(1, 2, 6, 7)
    offset[0, 0, 2, 3], offset[0, 1, 4, 4], offset[0, 0, 1, 1] = torch.nan, torch.inf, -1e30
    offset.requires_grad_()
    out = deform_conv2d(x, offset, weight)
    assert bool(out[0, :, 2, 3].isnan().all())
    assert not out[0, :, 4, 4].any() and not out[0, :, 1, 1].any()
    dx, doffset = torch.autograd.grad(out, (x, offset), torch.ones_like(out))
    assert bool(dx.isfinite().all()) and bool(doffset[0, :, 2, 3].isnan().all())
    assert not doffset[0, :, 4, 4].any() and int(doffset.isnan().sum()) == 2


def test_offsets_beyond_the_bound_are_clamped(monkeypatch: pytest.MonkeyPatch):
    """The halo is as wide as the bound; what is clamped or NaN stays in it, as on the CPU."""
    x, weight = torch.randn(1, 2, 6, 7), torch.randn(2, 2, 3, 3)
    offset = 4 * torch.randn(1, 18, 6, 7)
    offset[0, 0, 2, 3], offset[0, 3, 4, 4], offset[0, 5, 1, 1] = torch.nan, torch.inf, -1e30
    given = [each.requires_grad_() for each in (x, offset, weight)]
    results = []
    for module in (None, deform):
        if module is not None:
            monkeypatch.setattr(deform_operator, "kernels_for", lambda _: deform)
        out = deform_conv2d(*given, padding=1, bound=1.5)
        finite = torch.where(out.isnan(), 0.0, out)
        results.append([finite, *torch.autograd.grad(finite.sum(), given[:2])])
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert error(found.nan_to_num(), expected.nan_to_num()) < TOLERANCES[FLOAT]
