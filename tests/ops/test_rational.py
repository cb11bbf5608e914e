"""Rational activations are their formula, in values, gradients and gradients of these."""

from __future__ import annotations

import dataclasses
import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.codegen import load_optional_library
from penstock.ops import GroupRational, column_reduce, group_rational
from penstock.ops import _columns as columns
from penstock.ops.rational import _native, _torch
from penstock.ops.rational._operator import rational_backward, rational_forward

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCES = {  # of norms, relative
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,  # 11 bits of the result; sums are float32
    torch.bfloat16: 1e-2,  # 8 bits
}
DEGREES = [(5, 4), (2, 0), (0, 3)]
"""Degrees of the tests, each with a library of its own."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of a call."""

    rows: int
    groups: int
    width: int
    degrees: tuple[int, int]
    seed: int = 0

    def draw(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return dy, x and coefficients of the dtype of sums; some of them 0."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.groups * self.width)
        shapes = [shape, shape, (self.groups, self.degrees[0] + 1), (self.groups, self.degrees[1])]
        drawn = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
        drawn[3][:, :1] = 0.0
        of_sums = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = (dtype, dtype, of_sums, of_sums)
        return [each.to(of) for each, of in zip(drawn, dtypes, strict=True)]


cases = st.builds(
    Case,
    st.integers(0, 140),
    st.integers(1, 4),
    st.integers(1, 40) | st.just(600),
    st.sampled_from(DEGREES),
    st.integers(0, 9),
)


def formula(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """The activation, power by power."""
    of_groups = x.unflatten(-1, (len(numerator), -1))
    p = sum(a[:, None] * of_groups**i for i, a in enumerate(numerator.unbind(1)))
    size = of_groups.abs()
    q = 1 + sum(b.abs()[:, None] * size ** (j + 1) for j, b in enumerate(denominator.unbind(1)))
    return (p / q).flatten(-2)


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-3))


@pytest.fixture(params=["C++", "torch"])
def path(request, monkeypatch) -> str:
    """Both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "_library", lambda *_: None)
        monkeypatch.setattr(columns, "_library", lambda: None)
    return request.param


@settings(max_examples=60)
@given(cases, st.sampled_from(list(TOLERANCES)), st.booleans())
def test_values_and_gradients_are_those_of_the_formula(
    case: Case, dtype: torch.dtype, is_native: bool
):
    module = _native if is_native else _torch
    dy, *operands = case.draw(dtype)
    exact = [each.double().clone().requires_grad_() for each in operands]
    expected = formula(*exact)
    wanted = torch.autograd.grad(expected, exact, dy.double(), materialize_grads=True)
    found = (module.forward(*operands), *module.backward(dy, *operands))
    for each, right in zip(found, (expected, *wanted), strict=True):
        assert relative_error(each, right.detach()) < TOLERANCES[dtype]
    assert [each.dtype for each in found[:2]] == [dtype] * 2


@pytest.mark.parametrize("degrees", DEGREES)
def test_gradients_are_those_of_differences(path: str, degrees: tuple[int, int]):
    _, *given = (each.requires_grad_() for each in Case(6, 2, 3, degrees).draw())
    given[2].data += 0.3  # where |b| has a derivative
    assert torch.autograd.gradcheck(group_rational, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(group_rational, given, fast_mode=True)


def test_third_derivatives_are_those_of_the_formula():
    _, x, *coefficients = Case(1, 1, 8, (5, 4)).draw()
    found = []
    for function in (group_rational, formula):
        each = x.clone().requires_grad_()
        value = function(each, *coefficients)
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), each, create_graph=True)
        found.append(value.detach())
    assert relative_error(*found) < 1e-12


def test_coefficients_for_all_groups_and_inputs_of_any_shape():
    x = torch.randn(3, 5, 12).transpose(0, 1)
    numerator, denominator = torch.randn(1, 6), torch.randn(4, 4)
    found = group_rational(x, numerator, denominator)
    assert relative_error(found, formula(x, numerator.expand(4, -1), denominator)) < 1e-6
    assert found.shape == (5, 3, 12)
    assert group_rational(x[0, 0], numerator, denominator).shape == (12,)


def test_the_operators_keep_the_rules_of_torch(path: str):
    dy, *operands = (each.requires_grad_() for each in Case(70, 2, 5, (5, 4)).draw(torch.float32))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(rational_forward, tuple(operands), test_utils=tests)
    torch.library.opcheck(rational_backward, (dy, *operands), test_utils=tests)
    torch.library.opcheck(columns._column_reduce, (dy,), test_utils=tests)


def test_compiled_graphs_have_the_operator_whole(path: str):
    module = GroupRational(2)
    x = torch.randn(20, 12, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return column_reduce(module(x * 2).relu())

    given = (x, *module.parameters())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))
    results = [torch.autograd.grad(each(x).sum(), given) for each in (compiled, step)]
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@settings(max_examples=10)
@given(cases, st.sampled_from([torch.float32, torch.bfloat16]))
def test_bits_do_not_depend_on_threads(case: Case, dtype: torch.dtype):
    dy, *operands = case.draw(dtype)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found = _native.forward(*operands), *_native.backward(dy, *operands), column_reduce(dy)
        results.append(found)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_sums_of_coefficients_lose_a_hundredth_of_what_one_after_the_other_loses():
    """Two million terms near 1: one after the other in float32, by torch, and by tiles."""
    x = torch.rand(20_000, 100) + 0.5
    numerator, denominator = torch.ones(1, 2), torch.ones(1, 0)
    exact = float(x.double().sum())
    in_order = float(np.cumsum(x.numpy().ravel())[-1])
    found = _native.backward(torch.ones_like(x), x, numerator, denominator)[1][0, 1]
    error, of_torch = abs(float(found) - exact), abs(float(x.sum()) - exact)
    assert error <= max(of_torch, exact * 2**-24)
    assert abs(in_order - exact) > 100 * error


def test_sums_of_columns_are_those_of_float64(path: str):
    for dtype, tolerance in TOLERANCES.items():
        x = torch.rand(2, 150, 1100, dtype=torch.float64).to(dtype).requires_grad_()
        sums = column_reduce(x)
        assert sums.dtype == dtype
        assert relative_error(sums.detach(), x.detach().double().sum((0, 1))) < tolerance
        (dx,) = torch.autograd.grad(sums, x, torch.arange(1100, dtype=dtype))
        assert torch.equal(dx, torch.arange(1100, dtype=dtype).expand(x.shape))
    assert torch.equal(column_reduce(torch.ones(0, 3)), torch.zeros(3))
    assert column_reduce(torch.ones(4, 0)).shape == (0,)


# ------------------------------------------------------------------------- the module


@pytest.mark.parametrize(
    ("activation", "most"),
    [
        (torch.nn.functional.gelu, 3e-3),
        (torch.nn.functional.silu, 1e-4),
        (torch.tanh, 1e-4),
        (torch.nn.functional.relu, 6e-2),  # it has a corner
        (lambda x: x, 1e-6),
    ],
)
def test_modules_begin_as_the_activation(activation, most: float):
    module = GroupRational(3, activation=activation, dtype=torch.float64)
    x = torch.linspace(-4, 4, 300, dtype=torch.float64)[:, None].expand(-1, 3)
    assert (module(x) - activation(x)).abs().max().item() < most


def test_modules_learn_and_keep_their_coefficients():
    module = GroupRational(2, 3, 2)
    x = torch.randn(64, 8)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    other = GroupRational(2, 3, 2)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert "numerator_degree=3" in repr(module)


def test_modules_of_any_function_can_be_pickled_and_begin_again():
    module = GroupRational(2, activation=lambda x: x)
    begun = module.numerator.detach().clone()
    other = pickle.loads(pickle.dumps(module))
    torch.nn.init.zeros_(other.numerator)
    other.reset_parameters()
    assert torch.equal(other.numerator, begun)


def test_flops_are_two_and_six_of_a_coefficient():
    x = torch.randn(10, 8, requires_grad=True)
    module = GroupRational(2)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert counter.get_total_flops() == (2 + 6) * 80 * 10


def test_the_way_without_a_compiler_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(_native, "load_optional_library", _without_compiler)
    _native._library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "penstock"):
            x = torch.randn(5, 4)
            for _ in range(3):
                found = group_rational(x, torch.ones(2, 2), torch.ones(2, 1))
        assert relative_error(found, formula(x, torch.ones(2, 2), torch.ones(2, 1))) < 1e-6
        assert len([each for each in caplog.messages if "by torch" in each]) == 1
    finally:
        _native._library.cache_clear()


def _without_compiler(name: str, source, **options):
    return load_optional_library(name, "#error nothing can be built", **options)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 8), (2,), (2, 1)), "must have"),
        (((3, 8), (2, 0), (2, 1)), "no coefficients"),
        (((3, 8), (2, 3), (4, 1)), "same number"),
        (((3, 8), (3, 3), (3, 1)), "multiple of the 3 groups"),
        (((3, 8), (0, 3), (0, 1)), "same number"),
        (((), (1, 3), (1, 1)), "must have"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message: str):
    with pytest.raises(ValueError, match=message):
        group_rational(*(torch.zeros(shape) for shape in shapes))


def test_other_operands_are_refused():
    x, numerator, denominator = torch.zeros(3, 4), torch.zeros(2, 3), torch.zeros(2, 1)
    with pytest.raises(TypeError, match=r"x has the dtype torch.int64.*x\.float"):
        group_rational(x.long(), numerator, denominator)
    with pytest.raises(ValueError, match="one device"):
        group_rational(x, numerator.to("meta"), denominator)
    with pytest.raises(ValueError, match="numerator_degree is -1"):
        GroupRational(2, -1)
    with pytest.raises(TypeError, match="x has the dtype"):
        column_reduce(x.bool())
    with pytest.raises(ValueError, match="no dimensions"):
        column_reduce(torch.tensor(1.0))
