"""Deformable convolutions are those of their definition, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from penstock.ops import deform_conv2d
from penstock.ops.deform import _native, _torch
from penstock.ops.deform._operator import deform_backward, deform_forward
from penstock.ops.deform._shapes import DeformGeometry, DeformInputs

TOLERANCES = {  # of norms, relative
    torch.float64: 1e-13,
    torch.float32: 1e-5,  # sums of some hundred products
    torch.float16: 2e-3,  # 11 bits
    torch.bfloat16: 2e-2,  # 8 bits
}


@pytest.fixture(params=["C++", "torch"])
def path(request, monkeypatch) -> str:
    """Both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "_library", lambda: None)
    return request.param


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Shapes and numbers of calls, with groups of every kind."""
    groups = draw(st.sampled_from([1, 2, 3]))
    of_group = draw(st.sampled_from([1, 2, 5, 20]))
    channels = groups * of_group
    is_depthwise = of_group == 1 and draw(st.booleans())
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = [
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 13))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    return {
        "batch": draw(st.integers(0, 3)),
        "channels": channels,
        "outs": channels if is_depthwise else groups * draw(st.sampled_from([1, 3, 17])),
        "groups": groups,
        "offset_groups": draw(st.sampled_from([g for g in (1, 2, 3, 5) if channels % g == 0])),
        "kernel": kernel,
        "size": size,
        "geometry": DeformGeometry(
            stride=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            padding=padding,
            dilation=dilation,
        ),
        "has_mask": draw(st.booleans()),
        "has_bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def operands(case: dict, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """Return x, offset, weight, bias and mask, with gradients."""
    generator = torch.Generator().manual_seed(case["seed"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x = draw(case["batch"], case["channels"], *case["size"])
    weight = draw(case["outs"], case["channels"] // case["groups"], *case["kernel"])
    size, taps = case["geometry"].out_size(x, weight), case["kernel"][0] * case["kernel"][1]
    # Between pixels, not on them, where there are two derivatives: offsets have few bits.
    shape = (case["batch"], 2 * taps * case["offset_groups"], *size)
    between = 0.1 + 0.8 * torch.rand(shape, generator=generator)
    offset = (2 * draw(*shape)).floor() + between.to(dtype)
    bias = draw(case["outs"]) if case["has_bias"] else None
    mask = draw(case["batch"], taps * case["offset_groups"], *size) if case["has_mask"] else None
    given = [x, offset, weight, bias, mask]
    return [None if each is None else each.requires_grad_() for each in given]


def define(given: list[Tensor | None], geometry: DeformGeometry) -> Tensor:
    """Return the output by its definition: hats of all pixels around each place."""
    x, offset, weight, bias, mask = given
    assert x is not None and offset is not None and weight is not None
    taps = weight.shape[2] * weight.shape[3]
    out_size, groups = geometry.out_size(x, weight), offset.shape[1] // (2 * taps)
    moved = offset.unflatten(1, (groups, taps, 2))
    samples = []
    for tap in range(taps):
        ky, kx = divmod(tap, weight.shape[3])
        row = torch.arange(out_size[0]) * geometry.stride[0] - geometry.padding[0]
        column = torch.arange(out_size[1]) * geometry.stride[1] - geometry.padding[1]
        y = row[:, None] + ky * geometry.dilation[0] + moved[:, :, tap, 0]
        at = column + kx * geometry.dilation[1] + moved[:, :, tap, 1]
        hat_y = (1 - (y[..., None] - torch.arange(x.shape[2])).abs()).clamp(min=0)
        hat_x = (1 - (at[..., None] - torch.arange(x.shape[3])).abs()).clamp(min=0)
        of_groups = x.unflatten(1, (groups, -1))
        sample = torch.einsum("bgcyx,bgijy,bgijx->bgcij", of_groups, hat_y, hat_x)
        if mask is not None:
            sample = sample * mask.unflatten(1, (groups, taps))[:, :, None, tap]
        samples.append(sample.flatten(1, 2))
    columns = torch.stack(samples, 2)
    of_weights = x.shape[1] // weight.shape[1]
    columns = columns.unflatten(1, (of_weights, -1))
    weights = weight.flatten(2).unflatten(0, (of_weights, -1))
    out = torch.einsum("bgckij,gock->bgoij", columns, weights).flatten(1, 2)
    return out if bias is None else out + bias[:, None, None]


def run(given: list[Tensor | None], geometry: DeformGeometry, **options) -> Tensor:
    x, offset, weight, bias, mask = given
    numbers = (geometry.stride, geometry.padding, geometry.dilation)
    return deform_conv2d(x, offset, weight, bias, *numbers, mask, **options)  # type: ignore[arg-type]


def gradients(out: Tensor, given: list[Tensor | None]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad(out, [each for each in given if each is not None], dout))


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float(
        (found - expected).norm() / expected.norm().clamp(min=0.1 * expected.numel() ** 0.5)
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["C++", "torch"]))
def test_values_and_gradients_are_those_of_the_definition(case: dict, path: str):
    given = operands(case)
    expected = define(given, case["geometry"])
    with pytest.MonkeyPatch.context() as patch:
        if path == "torch":
            patch.setattr(_native, "_library", lambda: None)
        out = run(given, case["geometry"])
        grads = gradients(out, given)
    assert out.shape == expected.shape
    if out.numel():
        assert error(out, expected) < TOLERANCES[torch.float64]
        for found, wanted in zip(grads, gradients(expected, given), strict=True):
            assert error(found, wanted) < TOLERANCES[torch.float64]


CASE = {
    "batch": 2, "channels": 40, "outs": 20, "groups": 1, "offset_groups": 2, "kernel": (3, 3),
    "size": [11, 12], "geometry": DeformGeometry(stride=(1, 2), padding=(1, 1), dilation=(1, 1)),
    "has_mask": True, "has_bias": True, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_and_offsets_of_the_sums(path: str, dtype: torch.dtype):
    given = operands(CASE, dtype)
    exact = [None if e is None else e.detach().double().requires_grad_() for e in given]
    expected = define(exact, CASE["geometry"])
    dout_of = gradients(expected, exact)
    out = run(given, CASE["geometry"])
    assert out.dtype == dtype and error(out, expected) < TOLERANCES[dtype]
    for found, wanted, each in zip(gradients(out, given), dout_of, given, strict=True):
        assert each is not None and found.dtype == each.dtype
        assert error(found, wanted) < TOLERANCES[dtype]
    x, offset, weight, bias, mask = (None if e is None else e.detach() for e in given)
    assert offset is not None and mask is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mixed = [x, offset.to(wide), weight, bias, mask.to(wide)]
    assert torch.equal(run(mixed, CASE["geometry"]), out)


def test_bits_do_not_depend_on_threads_or_on_the_batch():
    for change in ({}, {"channels": 6, "offset_groups": 1, "batch": 3}):
        given = operands({**CASE, **change}, torch.float32)
        before, results = torch.get_num_threads(), []
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                out = run(given, CASE["geometry"])
                results.append([out, *gradients(out, given)])
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))
        alone = [e if e is None or e.dim() != 4 or i == 2 else e[:1] for i, e in enumerate(given)]
        assert torch.equal(run(alone, CASE["geometry"]), results[0][0][:1])


def test_without_offsets_it_is_a_convolution(path: str):
    x, weight = torch.randn(2, 6, 9, 8), torch.randn(4, 3, 3, 3)
    offset = torch.zeros(2, 18, 9, 8)
    expected = conv2d(x, weight, padding=1, groups=2)
    assert error(deform_conv2d(x, offset, weight, padding=1), expected) < 1e-6


def test_variants_are_the_general_one_where_they_coincide(path: str):
    x, weight = torch.randn(1, 4, 12, 12), torch.randn(5, 4, 3, 3)
    offset = (3 * torch.randn(1, 36, 12, 12)).requires_grad_()
    bounded = deform_conv2d(x, offset, weight, padding=1, bound=2.0)
    clamped = offset.detach().clamp(-2, 2)
    assert torch.equal(bounded, deform_conv2d(x, clamped, weight, padding=1))
    (grad,) = torch.autograd.grad(bounded.sum(), offset)
    assert not grad[offset.detach().abs() > 2].any() and bool(grad.any())
    within = deform_conv2d(x, clamped, weight, padding=1, bound=100.0)
    assert torch.equal(within, bounded)
    # Widening a square by 1 is a dilation of 2.
    ones = torch.ones(1, 2, 12, 12)
    widened = deform_conv2d(x, ones, weight, padding=1, square=True)
    assert error(widened, conv2d(x, weight, padding=2, dilation=2)) < 1e-6
    wide = torch.rand(1, 2, 12, 12, requires_grad=True)
    taps = torch.tensor([[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]).flatten()
    general = (wide.detach()[:, :, None] * taps[:, None, None]).flatten(1, 2)
    out = deform_conv2d(x, wide, weight, padding=1, square=True)
    assert torch.equal(out, deform_conv2d(x, general, weight, padding=1))
    assert torch.autograd.grad(out.sum(), wide)[0].shape == wide.shape


def test_offsets_that_are_none_or_far_away_stay_where_they_are(path: str):
    x = torch.randn(1, 3, 6, 7, requires_grad=True)
    weight = torch.randn(2, 3, 1, 1, requires_grad=True)
    offset = torch.zeros(1, 2, 6, 7)
    offset[0, 0, 2, 3] = torch.nan
    offset[0, 1, 4, 4] = torch.inf
    offset[0, 0, 1, 1] = -1e30
    offset.requires_grad_()
    out = deform_conv2d(x, offset, weight)
    expected = conv2d(x, weight)
    rest = torch.ones(6, 7, dtype=torch.bool)
    rest[2, 3] = rest[4, 4] = rest[1, 1] = False
    assert bool(out[0, :, 2, 3].isnan().all())
    assert not out[0, :, 4, 4].any() and not out[0, :, 1, 1].any()
    assert torch.allclose(out[0, :, rest], expected[0, :, rest], atol=1e-6)
    dx, doffset = torch.autograd.grad(out, (x, offset), torch.ones_like(out))
    assert bool(dx.isfinite().all()) and not dx[0, :, 2, 3].any()
    assert bool(doffset[0, :, 2, 3].isnan().all())
    assert not doffset[0, :, 4, 4].any() and bool(doffset[0, :, rest].isfinite().all())


def test_numbers_that_are_none_stay_in_their_group():
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(4, 1, 1, 1)
    x[0, 1] = torch.nan
    out = deform_conv2d(x, torch.zeros(1, 2, 5, 5), weight)
    assert bool(out[0, 1].isnan().all()) and bool(out[0, [0, 2, 3]].isfinite().all())
    weight = torch.randn(4, 2, 1, 1)
    out = deform_conv2d(x, torch.zeros(1, 2, 5, 5), weight)
    assert bool(out[0, :2].isnan().all()) and bool(out[0, 2:].isfinite().all())


def test_gradients_are_those_of_differences(path: str):
    case = {**CASE, "batch": 1, "channels": 4, "outs": 3, "size": [4, 5]}
    given = operands(case)
    geometry = case["geometry"]
    assert torch.autograd.gradcheck(lambda *g: run(list(g), geometry), given, fast_mode=True)
    x = given[0]
    assert x is not None
    (dx,) = torch.autograd.grad(run(given, geometry).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        dx.sum().backward()


def test_the_operators_keep_the_rules_of_torch(path: str):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for has_mask in (True, False):
        case = {**CASE, "channels": 4, "size": [4, 5], "has_mask": has_mask, "has_bias": has_mask}
        given = operands(case, torch.float32)
        numbers = case["geometry"].numbers
        torch.library.opcheck(deform_forward, (*given, numbers), test_utils=tests)
        detached = [None if each is None else each.detach() for each in given]
        dout = torch.ones_like(deform_forward(*detached, numbers))
        torch.library.opcheck(deform_backward, (dout, *detached, numbers), test_utils=tests)


def test_compiled_graphs_have_the_operator_whole(path: str):
    given = operands({**CASE, "channels": 4, "size": [4, 5]}, torch.float32)

    def call(*given: Tensor) -> Tensor:
        return run([given[0] * 2, *given[1:]], CASE["geometry"], bound=1.5).relu()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*given), call(*given)
    assert torch.equal(out, expected)
    for found, wanted in zip(gradients(out, given), gradients(expected, given), strict=True):
        assert torch.equal(found, wanted)


def test_autocast_and_flops():
    given = operands({**CASE, "batch": 3}, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(given, CASE["geometry"])
    assert out.dtype == torch.bfloat16
    assert [each.dtype for each in gradients(out, given)] == [torch.float32] * 5
    with FlopCounterMode(display=False) as counter:
        run(given, CASE["geometry"]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * out.numel() * 40 * 9


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"input": torch.zeros(1, 4, 5, 5).int()}, TypeError, "input has the dtype"),
        ({"weight": torch.zeros(2, 4, 3, 3).double()}, TypeError, "weight has the dtype"),
        ({"offset": torch.zeros(1, 18, 5, 5).half()}, TypeError, "offset has the dtype"),
        ({"input": torch.zeros(4, 5, 5)}, ValueError, "must have"),
        ({"input": torch.zeros(1, 5, 5, 5)}, ValueError, "a multiple of those of weight"),
        ({"input": torch.zeros(1, 12, 5, 5)}, ValueError, "divide the outputs"),
        ({"input": torch.zeros(1, 4, 0, 5)}, ValueError, "larger than the padded input"),
        ({"bias": torch.zeros(3)}, ValueError, "bias has the shape"),
        ({"offset": torch.zeros(1, 17, 5, 5)}, ValueError, "offset has the shape"),
        ({"offset": torch.zeros(1, 18, 5, 4)}, ValueError, "offset has the shape"),
        ({"offset": torch.zeros(1, 54, 5, 5)}, ValueError, "divide the 4 channels"),
        ({"mask": torch.zeros(1, 18, 5, 5)}, ValueError, "mask has the shape"),
        ({"stride": 0}, ValueError, "stride is 0"),
        ({"stride": 1.5}, TypeError, "stride is 1.5"),
        ({"padding": (1, 2, 3)}, ValueError, "padding is"),
        ({"bound": -1.0}, ValueError, "bound is -1"),
        ({"bound": float("nan")}, ValueError, "bound is nan"),
        ({"bound": "8"}, ValueError, "bound is '8'"),
        ({"square": True, "offset": torch.zeros(1, 1, 4, 5)}, ValueError, "square is true"),
        ({"offset": torch.zeros(1, 18, 5, 5, device="meta")}, ValueError, "on one device"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict, kind, message: str):
    call = {
        "input": torch.zeros(1, 4, 5, 5),
        "offset": torch.zeros(1, 18, 5, 5),
        "weight": torch.zeros(2, 4, 3, 3),
        "padding": 1,
    }
    with pytest.raises(kind, match=message):
        deform_conv2d(**{**call, **change})


def test_bands_of_torch_are_the_whole(monkeypatch):
    given = operands(CASE)
    detached = [None if each is None else each.detach() for each in given]
    inputs = DeformInputs(*detached, CASE["geometry"])  # type: ignore[arg-type]
    whole = _torch.forward(inputs)
    monkeypatch.setattr(_torch, "_BAND_PIXELS", 1)
    found = _torch.forward(inputs)
    assert torch.allclose(found, whole, rtol=0, atol=1e-12)
