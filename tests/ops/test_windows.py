"""Windows and filters of them are those of `F.unfold`, on both paths of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.ops import LocalConv2d, dynamic_filter2d, local_conv2d, unfold_windows
from penstock.ops.windows import _local, _native, _torch, _unfold
from penstock.ops.windows._geometry import Windows
from window_cases import Case, cases, filter_by_definition, largest_error, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCES = {  # of the largest element
    torch.float64: 1e-13,
    torch.float32: 5e-6,  # sums of up to some hundred products
    torch.float16: 2e-3,  # 11 bits of the result; sums are float32
    torch.bfloat16: 1e-2,  # 8 bits
}
PLAIN = Case(Windows((3, 3), (1, 1), (1, 1), (1, 1)), 2, 2, 2, 2, 6, 9)


@pytest.fixture(params=["C++", "torch"])
def path(request, monkeypatch) -> str:
    """Both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "_library", lambda: None)
    return request.param


def run(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    if case.is_dynamic:
        return dynamic_filter2d(x, weight, **case.options)
    return local_conv2d(x, weight, groups=case.groups, **case.options)


@settings(max_examples=60)
@given(cases(), st.sampled_from(list(TOLERANCES)), st.booleans())
def test_windows_are_those_of_unfold(case: Case, dtype: torch.dtype, is_native: bool):
    module = _native if is_native else _torch
    x = case.draw(dtype)[0]
    found = module.unfold(x, case.windows)
    assert torch.equal(found, windows_of(x.double(), case.windows).to(dtype))
    assert found.stride() == case.windows.strides_of(x.shape[1], case.out)
    dwindows = torch.randn(found.shape, dtype=torch.float64).to(dtype)
    exact = x.double().clone().requires_grad_()
    windows_of(exact, case.windows).backward(dwindows.double())
    dx = module.fold(dwindows, case.windows, case.height, case.width)
    assert dx.dtype == dtype and dx.is_contiguous()
    assert largest_error(dx, exact.grad) < TOLERANCES[dtype]


@settings(max_examples=60)
@given(cases(), st.sampled_from(list(TOLERANCES)), st.booleans())
def test_filters_and_gradients_are_those_over_unfold(
    case: Case, dtype: torch.dtype, is_native: bool
):
    module = _native if is_native else _torch
    x, weight = case.draw(dtype)
    exact = [each.double().clone().requires_grad_() for each in (x, weight)]
    expected = filter_by_definition(*exact, case)
    y = module.multiply(x, weight, case.windows, case.op_groups)
    dy = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    wanted = torch.autograd.grad(expected, exact, dy.double())
    size = (case.height, case.width)
    dx = module.differentiate_input(dy, weight, case.windows, case.op_groups, size)
    dweight = module.differentiate_weight(dy, x, weight, case.windows, case.op_groups)
    assert dweight.stride() == torch.empty_like(weight).stride()
    for found, each in zip((y, dx, dweight), (expected, *wanted), strict=True):
        assert found.dtype == dtype and found.shape == each.shape
        assert largest_error(found, each.detach()) < TOLERANCES[dtype]


def test_windows_are_contiguous_runs_of_a_third_of_the_memory():
    x = torch.randn(2, 8, 64, 64)
    windows = unfold_windows(x, 3, padding=1)
    run_of = windows[1, 5, 20, 33].mT  # column by column
    assert run_of.is_contiguous()
    columns = torch.nn.functional.unfold(x, 3, padding=1)
    ratio = windows.untyped_storage().nbytes() / columns.untyped_storage().nbytes()
    assert ratio <= 0.36  # the bar


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_gradients_are_those_of_differences(path: str, is_dynamic: bool):
    case = Case(Windows((2, 3), (1, 2), (1, 0), (2, 1)), 2, 2, 1, 2, 4, 5, is_dynamic)
    given = [each.requires_grad_() for each in case.draw()]
    assert torch.autograd.gradcheck(lambda *each: run(case, *each), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *each: run(case, *each), given, fast_mode=True)


def test_gradients_of_windows_are_those_of_differences(path: str):
    x = torch.randn(2, 2, 4, 5, dtype=torch.float64, requires_grad=True)

    def square(x: Tensor) -> Tensor:
        return unfold_windows(x, (2, 3), (2, 1), 1, (1, 2)).square()

    assert torch.autograd.gradcheck(square, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(square, x, fast_mode=True)


def test_the_operators_keep_the_rules_of_torch(path: str):
    numbers = PLAIN.windows.numbers
    x, weight = (each.float().requires_grad_() for each in PLAIN.draw())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_unfold._unfold, (x, numbers), test_utils=tests)
    windows = torch.randn(2, 4, 6, 9, 3, 3, requires_grad=True)
    torch.library.opcheck(_unfold._fold, (windows, numbers, 6, 9), test_utils=tests)
    for case in (PLAIN, Case(*list(vars(PLAIN).values())[:7], is_dynamic=True, is_moved=True)):
        x, weight = (each.float().requires_grad_() for each in case.draw())
        rest = (numbers, case.op_groups)
        torch.library.opcheck(_local._multiply, (x, weight, *rest), test_utils=tests)
        dy = torch.randn(2, 4, 6, 9, requires_grad=True)
        arguments = (dy, weight, *rest, (6, 9))
        torch.library.opcheck(_local._differentiate_input, arguments, test_utils=tests)
        arguments = (dy, x, weight.detach(), *rest)
        torch.library.opcheck(_local._differentiate_weight, arguments, test_utils=tests)


def test_compiled_graphs_have_the_operators_whole(path: str):
    x, weight = (each.float().requires_grad_() for each in PLAIN.draw())

    def step(x: Tensor, weight: Tensor) -> Tensor:
        y = local_conv2d(x * 2, weight, padding=1, groups=2)
        return (unfold_windows(y, 3) * 2).sum((-1, -2))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for each in (compiled, step):
        y = each(x, weight)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, weight))])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@settings(max_examples=10)
@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bits_do_not_depend_on_threads(case: Case, dtype: torch.dtype):
    x, weight = case.draw(dtype)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        y = _native.multiply(x, weight, case.windows, case.op_groups)
        size = (case.height, case.width)
        results.append(
            [
                y,
                _native.differentiate_input(y, weight, case.windows, case.op_groups, size),
                _native.differentiate_weight(y, x, weight, case.windows, case.op_groups),
                _native.fold(_native.unfold(x, case.windows), case.windows, *size),
            ]
        )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_samples_beyond_a_piece_and_weights_that_lie_otherwise():
    case = Case(PLAIN.windows, 70, 1, 2, 3, 6, 8)
    x, weight = case.draw()
    other = weight.transpose(4, 5).contiguous().transpose(4, 5).requires_grad_()
    y = run(case, x, other)
    expected = filter_by_definition(x, weight, case)
    assert largest_error(y.detach(), expected) < TOLERANCES[torch.float64]
    (found,) = torch.autograd.grad(y.square().sum(), other)
    weight.requires_grad_()
    (wanted,) = torch.autograd.grad(filter_by_definition(x, weight, case).square().sum(), weight)
    assert largest_error(found, wanted) < TOLERANCES[torch.float64]


def test_what_is_not_a_number_stays_at_its_place():
    case = Case(Windows((1, 3), (1, 1), (0, 1), (1, 1)), 1, 1, 1, 1, 2, 9)
    x, weight = (each.float() for each in case.draw())
    weight[..., 0, 0] = torch.inf
    dy = torch.ones(1, 1, 2, 9)
    dy[..., 0, 0] = 0.0
    dx = _native.differentiate_input(dy, weight, case.windows, 1, (2, 9))
    assert bool(dx[0, 0, 0, :2].isnan().all()) and bool(dx[0, 0, 0, 2:].isfinite().all())
    assert bool(dx[0, 0, 1].isfinite().all())
    assert not bool(_native.multiply(x, weight, case.windows, 1)[0, 0, 0, 0].isfinite())


# ------------------------------------------------------------------------- the layer


def test_layers_filter_as_the_function_and_learn():
    layer = LocalConv2d(4, 6, 3, (6, 9), padding=1, groups=2)
    x = torch.randn(3, 4, 6, 9)
    expected = local_conv2d(x, layer.weight.contiguous(), layer.bias, padding=1, groups=2)
    assert torch.equal(layer(x), expected)
    layer(x).square().mean().backward()
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert layer.weight.movedim(4, 0).is_contiguous()  # in the order in which windows pass
    assert layer.bias.grad.shape == (6, 6, 9)
    before = layer(x).square().mean().item()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer(x).square().mean().item() < before


def test_state_dicts_are_contiguous_and_load_into_the_order_of_windows():
    layer = LocalConv2d(2, 3, (1, 2), (4, 5), bias=False)
    state = layer.state_dict()
    assert state["weight"].is_contiguous() and torch.equal(state["weight"], layer.weight)
    other = LocalConv2d(2, 3, (1, 2), (4, 5), bias=False)
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight)
    for each in (other, copy.deepcopy(layer), copy.deepcopy(layer).double()):
        assert each.weight.movedim(4, 0).is_contiguous()
    assert "kernel_size=(1, 2)" in repr(layer)


def test_autocast_and_flops():
    layer = LocalConv2d(2, 3, 3, 8, padding=1, bias=False)
    x = torch.randn(5, 2, 8, 8, requires_grad=True)
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * layer.weight.numel()


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, w: (x.int(), w), TypeError, "x has the dtype torch.int32"),
        (lambda x, w: (x, w.int()), TypeError, "weight has the dtype torch.int32"),
        (lambda x, w: (x[0], w), ValueError, r"must be \(N, C, H, W\)"),
        (lambda x, w: (x[:, :3], w), ValueError, r"O, 3 / 2, Fh, Fw"),
        (lambda x, w: (x, w[:3]), ValueError, "O a multiple of 2"),
        (lambda x, w: (x, w[..., :8]), ValueError, r"\(6, 8\) positions"),
        (lambda x, w: (x, w[:, :, :0]), ValueError, "kernel of 0 x 3"),
        (lambda x, w: (x.to("meta"), w), ValueError, "one device"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        local_conv2d(*change(*PLAIN.draw()), padding=1, groups=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "kernel is 0"),
        ((3, 0), ValueError, "stride is 0"),
        ((3, 1, -1), ValueError, "padding is -1"),
        ((3, 1, 0, (1, 0)), ValueError, "dilation is"),
        ((7,), ValueError, "no window fits"),
        ((2.5,), TypeError, "int or a pair"),
        (((1, 2, 3),), TypeError, "int or a pair"),
    ],
)
def test_windows_that_there_are_not_are_refused(arguments, error, message: str):
    with pytest.raises(error, match=message):
        unfold_windows(torch.zeros(1, 1, 6, 6), *arguments)


def test_filters_of_other_samples_and_layers_of_other_groups_are_refused():
    x, filters = torch.zeros(2, 4, 5, 5), torch.zeros(1, 2, 1, 1, 5, 5)
    with pytest.raises(ValueError, match="must have \\(2, G"):
        dynamic_filter2d(x, filters)
    with pytest.raises(ValueError, match="G dividing 4"):
        dynamic_filter2d(x, torch.zeros(2, 3, 1, 1, 5, 5))
    with pytest.raises(ValueError, match="must divide in_channels 3"):
        LocalConv2d(3, 4, 1, 5, groups=2)
    with pytest.raises(ValueError, match="groups is 0"):
        local_conv2d(x, torch.zeros(4, 4, 1, 1, 5, 5), groups=0)
