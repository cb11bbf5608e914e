"""Triton kernels of sparse products and deformable convolutions: interpreted, compiled, run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ops.deform._shapes import DeformGeometry, DeformInputs
from test_deform import CASE, define, error, gradients, operands, run
from test_spgemm import check, draw
from triton_tests import compile_well, needs_triton, run_interpreted

HERE = Path(__file__).resolve().parent
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Of norms, relative: sums of some hundred products; columns are rounded to 11 and 8 bits."""


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    run_interpreted(HERE / "interpreted_sparse_deform.py", at_least=25)


def record_deform(
    dtype: torch.dtype, channels: int, geometry: DeformGeometry = CASE["geometry"]
) -> list[Any]:
    """Return the launches of a 3 x 3 convolution with a mask, forward and backward."""
    from penstock.ops.deform.triton import backward, forward

    case = {**CASE, "batch": 1, "channels": channels, "outs": channels, "size": [16, 20]}
    x, offset, weight, bias, mask = (
        None if each is None else each.detach() for each in operands(case, dtype)
    )
    assert offset is not None and mask is not None
    given = DeformInputs(x, offset.float(), weight, bias, mask.float(), geometry)
    found: list[Any] = []
    out = forward(given, run=found.append)
    backward(out, given, run=found.append)
    return found


def record_products(index: torch.dtype) -> list[Any]:
    """Return the launches of a product, forward and backward."""
    from penstock.ops import product_pattern
    from penstock.ops.sparse._rows import KnownProduct
    from penstock.ops.sparse.triton import differentiate, multiply

    a = draw(40, 40, 0.3, index=index).float()
    pattern = product_pattern(a, a)
    product = KnownProduct(*pattern._rows, a.values(), a.values(), False, 1)
    found: list[Any] = []
    values = multiply(product, run=found.append)
    differentiate(product, values, run=found.append)
    return found


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_without_spills_or_atomics(dtype: torch.dtype, target: str):
    index = torch.int32 if dtype == torch.float32 else torch.int64
    bounded = dataclasses.replace(CASE["geometry"], reach=2)
    launches = [
        *(*record_deform(dtype, 64), record_deform(dtype, 64, bounded)[-1]),
        *record_products(index),
    ]
    names = [each.kernel.__name__ for each in launches]
    assert names[:5] == [
        "convolve_tiles",
        "differentiate_weights",
        "differentiate_places",
        "gather_gradients",
        "gather_halo",
    ]
    assert names[5:] == ["sample_products"] * 3
    for launch in launches:
        stages = launch.num_stages if target == "sm_90" else 1
        compile_well(dataclasses.replace(launch, num_stages=stages), target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_on_a_device_convolutions_are_those_of_float64_and_the_same_in_every_run(dtype):
    for change in ({}, {"groups": 2, "outs": 6}, {"channels": 64, "outs": 96, "size": [40, 33]}):
        given = operands({**CASE, **change}, dtype)
        exact = [None if e is None else e.detach().double().requires_grad_() for e in given]
        expected = define(exact, CASE["geometry"])
        wanted = [expected, *gradients(expected, exact)]
        on_device = [None if e is None else e.detach().cuda().requires_grad_() for e in given]
        runs = []
        for _ in range(2):
            out = run(on_device, CASE["geometry"])
            generator = torch.Generator().manual_seed(5)
            dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            leaves = [each for each in on_device if each is not None]
            runs.append([out, *torch.autograd.grad(out, leaves, dout.to(dtype).cuda())])
        for first, second, each in zip(*runs, wanted, strict=True):
            assert torch.equal(first, second), change
            assert error(first.detach().cpu(), each.detach()) < TOLERANCES[dtype], change


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_device_products_are_those_of_the_cpu(dtype):
    from penstock.ops import spgemm

    a, b = draw(300, 200, 0.1, dtype=dtype), draw(200, 400, 0.1, 1, dtype=dtype)
    expected = check(a, b)
    given = [each.cuda().requires_grad_() for each in (a, b)]
    runs = []
    for _ in range(2):
        c = spgemm(*given)
        grads = torch.autograd.grad(c.to_dense().sum(), given)
        runs.append([c.values(), *(each.values() for each in grads)])
    assert torch.equal(c.col_indices().cpu(), expected.col_indices())
    assert error(runs[0][0].detach().cpu(), expected.values()) < 1e-5
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
