"""Triton kernels of ops: interpreted, compiled for GPUs, and run on one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fork_servers import find_python
from penstock.ops import column_reduce, group_rational, local_conv2d, unfold_windows
from penstock.ops.windows._geometry import Windows
from triton_tests import compile_well, needs_triton, run_interpreted
from window_cases import Case, filter_by_definition, largest_error, windows_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCES = {DOUBLE: 1e-12, FLOAT: 1e-5, HALF: 2e-3, BRAIN: 2e-2}
"""Of the largest element: sums of some hundred products; else 11 and 8 bits of results."""


@needs_triton
@pytest.mark.slow
def test_values_and_bytes_under_the_interpreter():
    run_interpreted(HERE / "interpreted_ops.py", at_least=32)


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import sys, torch\nfrom penstock.ops import column_reduce, unfold_windows\n"
        "column_reduce(unfold_windows(torch.ones(1, 1, 4, 4), 3).flatten(1))\n"
        "assert not any(each.endswith('_launch') for each in sys.modules if 'ops' in each)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([find_python("torch"), "-c", code], env=environment, check=False)
    assert done.returncode == 0


# ------------------------------------------------------------------------ compiled


def record_launches(dtype: torch.dtype) -> list[Any]:
    """The launches of each function, forward and backward."""
    from penstock.ops import _column_launch as columns
    from penstock.ops.rational import _launch as rational
    from penstock.ops.windows import _launch as windows

    found: list[Any] = []
    of_sums = DOUBLE if dtype == DOUBLE else FLOAT
    x, numerator = torch.empty(500, 768, dtype=dtype), torch.empty(8, 6, dtype=of_sums)
    denominator = torch.empty(8, 4, dtype=of_sums)
    rational.forward(x, numerator, denominator, run=found.append)
    rational.backward(x, x, numerator, denominator, run=found.append)
    columns.reduce_columns(x, run=found.append)
    of = Windows((3, 3), (1, 1), (1, 1), (1, 1))
    images, weight = torch.empty(8, 4, 30, 32, dtype=dtype), torch.empty(6, 4, 3, 3, 30, 32)
    dy, weight = torch.empty(8, 6, 30, 32, dtype=dtype), weight.to(dtype)
    unfolded = windows.unfold(images, of, run=found.append)
    windows.fold(unfolded, of, 30, 32, run=found.append)
    windows.multiply(images, weight, of, 1, run=found.append)
    windows.differentiate_input(dy, weight, of, 1, (30, 32), run=found.append)
    windows.differentiate_weight(dy, images, weight, of, 1, run=found.append)
    return found


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, DOUBLE])
def test_kernels_compile_without_spills_or_atomics(dtype: torch.dtype, target: str):
    launches = record_launches(dtype)
    names = {launch.kernel.__name__ for launch in launches}
    assert names == {
        *("evaluate", "differentiate", "sum_rows", "add_partials", "unfold_rows", "sum_windows"),
        *("multiply", "differentiate_input", "differentiate_weight"),
    }
    for launch in launches:
        compile_well(launch, target)


@needs_triton
def test_products_are_added_in_one_rounding_whatever_tritons_default_is(monkeypatch):
    from _kernel_resources import compile_launch

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    compiled = compile_launch(record_launches(FLOAT)[0], "sm_90")
    assert "fma.rn.f32" in str(compiled.asm["ptx"])


# ----------------------------------------------------------------------- a device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_on_a_device_results_are_those_of_float64_and_the_same_in_every_run(dtype):
    from penstock.ops.rational._torch import evaluate

    of_sums = DOUBLE if dtype == DOUBLE else FLOAT
    x = torch.randn(3000, 768, device="cuda").to(dtype).requires_grad_()
    coefficients = [
        torch.randn(8, each, device="cuda", dtype=of_sums, requires_grad=True) for each in (6, 4)
    ]
    exact = [each.detach().double().requires_grad_() for each in (x, *coefficients)]
    dy = torch.randn(3000, 768, device="cuda").to(dtype)
    wanted = evaluate(*exact)
    expected = [wanted, *torch.autograd.grad(wanted, exact, dy.double()), exact[0].sum(0)]
    runs = []
    for _ in range(2):
        y = group_rational(x, *coefficients)
        grads = torch.autograd.grad(y, (x, *coefficients), dy)
        runs.append([y, *grads, column_reduce(x)])
    for first, second, each in zip(*runs, expected, strict=True):
        assert torch.equal(first, second)
        assert largest_error(first.detach(), each.detach()) < TOLERANCES[dtype]
    case = Case(Windows((3, 3), (1, 2), (1, 1), (2, 1)), 9, 2, 3, 4, 20, 40)
    given = [each.cuda().requires_grad_() for each in case.draw(dtype)]
    exact = [each.detach().double().requires_grad_() for each in given]
    y, wanted = local_conv2d(*given, groups=2, **case.options), filter_by_definition(*exact, case)
    dy = torch.randn(wanted.shape, device="cuda").to(dtype)
    for found, each in zip(
        (y, *torch.autograd.grad(y, given, dy)),
        (wanted, *torch.autograd.grad(wanted, exact, dy.double())),
        strict=True,
    ):
        assert largest_error(found.detach(), each.detach()) < TOLERANCES[dtype]
    found = unfold_windows(given[0], case.windows.kernel, **case.options)
    assert torch.equal(found.double(), windows_of(exact[0], case.windows))
