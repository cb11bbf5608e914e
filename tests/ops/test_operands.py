"""No operator drops a tangent in silence, and what is no operand has an error that says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.ops import (
    GroupRational,
    LocalConv2d,
    column_reduce,
    deform_conv2d,
    dynamic_filter2d,
    group_rational,
    local_conv2d,
    product_pattern,
    spgemm,
    unfold_windows,
)

EYE = torch.eye(3).to_sparse_csr()
IMAGES, OFFSETS = torch.rand(1, 2, 4, 4), torch.rand(1, 18, 2, 2)
CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "group_rational": (group_rational, [torch.rand(2, 4), torch.rand(2, 3), torch.rand(2, 2)]),
    "column_reduce": (column_reduce, [torch.rand(3, 2)]),
    "unfold_windows": (lambda x: unfold_windows(x, 3), [IMAGES]),
    "local_conv2d": (local_conv2d, [IMAGES, torch.rand(2, 2, 3, 3, 2, 2)]),
    "dynamic_filter2d": (dynamic_filter2d, [IMAGES, torch.rand(1, 1, 3, 3, 2, 2)]),
    "deform_conv2d": (deform_conv2d, [IMAGES, OFFSETS, torch.rand(2, 2, 3, 3)]),
    "spgemm": (product_pattern(EYE, EYE).multiply, [torch.rand(3), torch.rand(3)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_derivatives_are_refused_and_never_zero(name: str):
    function, operands = CALLS[name]
    for place, dual in enumerate(operands):
        given = list(operands)

        def of_one(each: Tensor, given: list[Tensor] = given, place: int = place) -> Tensor:
            return function(*given[:place], each, *given[place + 1 :])

        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.func.jvp(of_one, (dual,), (torch.ones_like(dual),))


@pytest.mark.parametrize("name", CALLS)
def test_samples_of_vmap_are_computed_as_alone(name: str):
    function, operands = CALLS[name]
    many = [torch.stack([each, 2 * each]) for each in operands]
    found = torch.func.vmap(function)(*many)
    assert torch.equal(found, torch.stack([function(*each) for each in zip(*many, strict=True)]))


@pytest.mark.parametrize("name", CALLS)
def test_many_gradients_at_once_are_those_one_by_one(name: str):
    function, operands = CALLS[name]
    given = [each.clone().requires_grad_() for each in operands]
    out = function(*given)
    many = torch.rand(2, *out.shape)

    def differentiate(gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given, gradient, retain_graph=True)

    expected = [torch.stack(each) for each in zip(*map(differentiate, many), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(differentiate)(many)), expected)
    if name in ("deform_conv2d", "spgemm"):
        with pytest.raises(NotImplementedError, match=r"have torch\.func\.vmap call"):
            torch.autograd.grad(out, given, many, is_grads_batched=True)


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_are_negated_lazily_are_read_so(name: str):
    function, operands = CALLS[name]
    lazy = [torch._neg_view(-each).requires_grad_() for each in operands]
    plain = [each.clone().requires_grad_() for each in operands]
    found, expected = function(*lazy), function(*plain)
    assert torch.equal(found, expected)
    gradient = torch.rand(found.shape)
    of_lazy = torch.autograd.grad(found, lazy, torch._neg_view(-gradient))
    of_plain = torch.autograd.grad(expected, plain, gradient)
    assert all(map(torch.equal, of_lazy, of_plain))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_torch_func_are_refused_by_name(name: str):
    function, operands = CALLS[name]
    many = [torch.stack([each, each]) for each in operands]

    def total(*given: Tensor) -> Tensor:
        return function(*given).sum()

    for place in range(len(operands)):
        gradient = torch.func.grad(total, argnums=place)
        for transform, given in ((gradient, operands), (torch.vmap(gradient), many)):
            with pytest.raises(NotImplementedError, match=r"is differentiated by torch\.func"):
                transform(*given)
    # What a transform does not follow is computed.
    gradient = torch.func.grad(lambda factor: factor * total(*operands))(torch.tensor(1.0))
    assert torch.equal(gradient, total(*operands))


def test_what_is_no_pattern_is_refused():
    with pytest.raises(TypeError, match="pattern is Tensor: make it by product_pattern"):
        spgemm(EYE, EYE, pattern=EYE)


def test_activations_that_cannot_be_fitted_are_refused():
    with pytest.raises(TypeError, match="activation is 'relu', but must be a function"):
        GroupRational(2, activation="relu")
    with pytest.raises(ValueError, match=r"not finite, elementwise, between -4\.0 and 4\.0"):
        GroupRational(2, activation=torch.log)
    for interval in ((1.0,), (1.0, 1.0), (2.0, float("inf")), 3.0):
        with pytest.raises(ValueError, match=r"interval is .*, but must be two finite numbers"):
            GroupRational(2, interval=interval)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unfold_windows(None, 3), "x is a NoneType, but must be a tensor"),
        (lambda: group_rational([1.0], torch.ones(1, 2), torch.ones(1, 1)), "x is a list"),
        (lambda: deform_conv2d([1.0], torch.ones(1), torch.ones(1)), "input is a list"),
        (lambda: deform_conv2d(IMAGES, None, torch.ones(1)), "offset is a NoneType"),
        (lambda: deform_conv2d(IMAGES, OFFSETS, torch.ones(1), mask=[1.0]), "mask is a list"),
        (lambda: local_conv2d(IMAGES, [1.0]), "weight is a list"),
        (lambda: dynamic_filter2d(IMAGES, None), "filters is a NoneType"),
    ],
)
def test_operands_that_are_no_tensors_are_refused(call, message: str):
    with pytest.raises(TypeError, match=message):
        call()


def test_gradients_of_one_operand_alone_are_those_of_both():
    a, b = (torch.rand(6, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    sparse = [each.where(each > 0.5, 0).to_sparse_csr().requires_grad_() for each in (a, b)]
    both = torch.autograd.grad(spgemm(*sparse).values().sum(), sparse)
    left = torch.autograd.grad(spgemm(sparse[0], sparse[1].detach()).values().sum(), sparse[0])
    right = torch.autograd.grad(spgemm(sparse[0].detach(), sparse[1]).values().sum(), sparse[1])
    for found, wanted in zip((*left, *right), both, strict=True):
        assert torch.equal(found.values(), wanted.values())


# --------------------------------------------------------------------------- whole numbers


def deform(**options) -> Tensor:
    return deform_conv2d(IMAGES, OFFSETS, torch.rand(2, 2, 3, 3), **options)


def filter_locally(**options) -> Tensor:
    return local_conv2d(IMAGES, torch.rand(2, 2, 3, 3, 2, 2), **options)


def test_whole_numbers_of_other_libraries_are_ints():
    one, two = np.int64(1), np.int32(2)
    assert filter_locally(stride=one, padding=(0, np.uint8(0)), groups=one).shape == (1, 2, 2, 2)
    assert deform(stride=one, dilation=[one, 1]).shape == (1, 2, 2, 2)
    assert unfold_windows(IMAGES, two).shape == (1, 2, 3, 3, 2, 2)
    layer = LocalConv2d(two, np.int64(4), two, (np.int64(4), 4), groups=two)
    assert layer(IMAGES).shape == (1, 4, 3, 3) and type(layer.groups) is int
    assert GroupRational(two, one, torch.tensor(0)).numerator.shape == (2, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GroupRational(2.5), TypeError, r"num_groups is 2\.5 of type float.*pass an int"),
        (lambda: GroupRational(2, 5.0), TypeError, r"numerator_degree is 5\.0"),
        (lambda: GroupRational(2, 5, "4"), TypeError, "denominator_degree is '4'"),
        (lambda: LocalConv2d(4, 6, 3, 6.5), TypeError, r"image_size is 6\.5, but must be an int"),
        (lambda: LocalConv2d(4, 6, 3, (6, 7, 8)), TypeError, r"image_size is \(6, 7, 8\)"),
        (lambda: LocalConv2d(4, 6, 3.0, 6), TypeError, r"kernel_size is 3\.0"),
        (lambda: LocalConv2d(-4, 6, 3, 6), ValueError, "in_channels is -4, but must be at least 0"),
        (lambda: LocalConv2d(4, 6.0, 3, 6), TypeError, r"out_channels is 6\.0"),
        (lambda: LocalConv2d(4, 6, 3, 6, groups=2.0), TypeError, r"groups is 2\.0"),
        (lambda: filter_locally(groups=1.0), TypeError, r"groups is 1\.0"),
        (lambda: filter_locally(padding=np.float64(1)), TypeError, "padding is np.float64"),
        (lambda: deform(stride=(1, 1.0)), TypeError, r"stride is \(1, 1\.0\)"),
        (lambda: deform(stride=None), TypeError, "stride is None"),
    ],
)
def test_other_numbers_are_refused(call, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------------------- biases


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (2,), (5, 1, 1), (5, 3, 2), (1, 5, 1, 1), (4, 5, 3, 2)])
def test_biases_are_broadcast_to_the_result(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = torch.rand(4, 1, 3, 2, dtype=dtype), torch.rand(5, 1, 1, 1, 3, 2, dtype=dtype)
    for bias in (torch.rand(shape, dtype=dtype), torch.rand(shape)):
        expected = local_conv2d(x, weight) + bias.to(dtype)
        assert torch.equal(local_conv2d(x, weight, bias), expected)


def test_graphs_of_open_shapes_have_biases():
    compiled = torch.compile(local_conv2d, fullgraph=True, backend="eager", dynamic=True)
    operands = IMAGES, torch.rand(5, 2, 3, 3, 2, 2), torch.rand(5, 2, 2)
    assert torch.equal(compiled(*operands), local_conv2d(*operands))


def test_derivatives_of_a_bias_are_those_of_torch():
    weight, bias = torch.rand(2, 2, 3, 3, 2, 2), torch.rand(2, 1, 1)

    def of_bias(bias: Tensor) -> Tensor:
        return local_conv2d(IMAGES, weight, bias)

    tangent = torch.func.jvp(of_bias, (bias,), (bias,))[1]
    assert torch.equal(tangent, bias.expand(1, 2, 2, 2))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (torch.zeros(3, 1, 2, 2, 2), ValueError, r"bias has the shape \(3, 1, 2, 2, 2\)"),
        (torch.zeros(3, 2, 2, 2), ValueError, r"broadcast to \(1, 2, 2, 2\)"),
        (torch.zeros(3, 2), ValueError, r"must have \(O, Ho, Wo\), \(2, 2, 2\)"),
        (torch.zeros(2, 2, 2).cfloat(), TypeError, "bias has the dtype torch.complex64"),
        (torch.zeros(2, 2, 2).long(), TypeError, "bias has the dtype torch.int64"),
        (torch.zeros(2, 2, 2, device="meta"), ValueError, "x, bias must be on one device"),
    ],
)
def test_biases_that_do_not_fit_are_refused(bias: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        filter_locally(bias=bias)


# --------------------------------------------------------------------------- devices, autocast


def test_a_shape_is_computed_without_memory():
    images, offsets = IMAGES.to("meta"), OFFSETS.to("meta")
    weight, bias = torch.rand(2, 2, 3, 3, device="meta"), torch.rand(2, device="meta")
    assert deform_conv2d(images, offsets, weight, bias).shape == (1, 2, 2, 2)
    values = torch.rand(3, device="meta")
    assert product_pattern(EYE, EYE).multiply(values, values).shape == (3,)


def test_autocast_does_not_cast_what_is_refused_without():
    bias = torch.ones(2, dtype=torch.complex64)
    with torch.autocast("cpu", torch.bfloat16):
        assert deform(bias=bias.real).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"bias has the dtype torch\.complex64"):
            deform(bias=bias)
