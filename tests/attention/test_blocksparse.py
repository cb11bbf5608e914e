"""Attention over blocks is attention by its definition, in its values and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import Pattern, dense_attention, documents, operands, patterns
from penstock.attention import Layout, _native, _torch, blocksparse, blocksparse_report
from penstock.attention._operands import BlockOperands
from penstock.attention._operator import blocksparse_backward, blocksparse_forward


def gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad(out, given, dout))


@settings(max_examples=40)
@given(patterns(), st.sampled_from([1, 2, 4]), st.integers(1, 40), st.booleans())
def test_the_oracle_is_attention_by_its_definition(
    pattern: Pattern, kv_heads: int, dim: int, has_bias: bool
):
    given = operands(pattern, batch=2, kv_heads=kv_heads, dim=dim, has_bias=has_bias)
    q, k, v, bias = [*given, None][:4]
    expected = dense_attention(q, k, v, bias, pattern.mask, 0.3)
    out = _torch.attend(q, k, v, pattern.layout, bias, 0.3)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    for found, gradient in zip(gradients(out, given), gradients(expected, given), strict=True):
        assert torch.allclose(found, gradient, rtol=0, atol=1e-11)


@settings(max_examples=40)
@given(patterns(), st.sampled_from([1, 2, 4]), st.integers(1, 40), st.booleans())
def test_the_path_without_kernels_is_the_oracle(
    pattern: Pattern, kv_heads: int, dim: int, has_bias: bool
):
    given = operands(pattern, batch=2, kv_heads=kv_heads, dim=dim, value_dim=8, has_bias=has_bias)
    q, k, v, bias = [*given, None][:4]
    expected = _torch.attend(q, k, v, pattern.layout, bias, 0.3)
    with torch.no_grad():
        call = BlockOperands(q, k, v, pattern.layout, bias, 0.3)
        out, lse = _torch.forward(call)
        dout = torch.randn_like(out)
        found = _torch.backward(dout, call, out, lse)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    seen = pattern.mask.any(-1).expand(lse.shape)
    assert torch.equal(lse == -torch.inf, ~seen)
    wanted = torch.autograd.grad(expected, given, dout)
    for each, gradient in zip(found, wanted, strict=False):
        assert each is not None
        assert torch.allclose(each, gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (4, 40), (2, 1, 40), (2, 4, 40)])
def test_a_bias_of_keys_has_a_gradient_in_its_shape(shape: tuple[int, ...]):
    pattern = Pattern(Layout.window(40, 9, 16), Layout.window(40, 9, 16).token_mask())
    q, k, v = operands(pattern, batch=2)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = blocksparse(q, k, v, pattern.layout, bias=bias)
    expected = dense_attention(q, k, v, bias.expand(2, 4, 40), pattern.mask, 0.25)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    (found,), (wanted,) = gradients(out, [bias]), gradients(expected, [bias])
    assert found.shape == shape
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_second_derivatives_are_refused():
    layout = Layout.window(20, 5, 16)
    q, k, v = operands(Pattern(layout, layout.token_mask()))
    (dq,) = torch.autograd.grad(blocksparse(q, k, v, layout).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        dq.sum().backward()


def test_transformations_of_functions_are_those_of_torch():
    pattern = documents([20, 9], 16, True, None)
    q, k, v = (each.detach() for each in operands(pattern, dim=8))

    def call(q: Tensor) -> Tensor:
        return blocksparse(q, k, v, pattern.layout)

    expected = call(q)
    step = 1e-6 * torch.randn_like(q)
    found, change = torch.func.jvp(call, (q,), (step,))[:2]
    torch.testing.assert_close((found, expected + change), (expected, call(q + step)))
    each = torch.func.vmap(call)(torch.stack([q, q + step]))
    torch.testing.assert_close(each, torch.stack([expected, call(q + step)]))
    q.requires_grad_()
    (theirs,) = torch.autograd.grad(call(q).sum(), q)
    torch.testing.assert_close(torch.func.grad(lambda q: call(q).sum())(q), theirs)


def test_operands_that_are_negated_lazily_are_read_so():
    pattern = documents([20, 9], 16, True, None)
    bias = torch.rand(29)
    plain = [*(each.detach().float() for each in operands(pattern, dim=8)), bias]
    lazy = [torch._neg_view(-each).requires_grad_() for each in plain]
    plain = [each.clone().requires_grad_() for each in plain]
    found = [blocksparse(*each[:3], pattern.layout, bias=each[3]) for each in (lazy, plain)]
    assert torch.equal(*found)
    gradient = torch.rand(found[0].shape)
    of_lazy = torch.autograd.grad(found[0], lazy, torch._neg_view(-gradient))
    assert all(map(torch.equal, of_lazy, torch.autograd.grad(found[1], plain, gradient)))


def test_many_gradients_at_once_are_those_one_by_one_or_refused():
    pattern = documents([20, 9], 16, True, None)
    given = [each.detach().requires_grad_() for each in operands(pattern, dim=8)]
    out = blocksparse(*given, pattern.layout, bias=torch.zeros(29))
    many = torch.rand(2, *out.shape, dtype=out.dtype)

    def differentiate(gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given, gradient, retain_graph=True)

    expected = [torch.stack(each) for each in zip(*map(differentiate, many), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(differentiate)(many)), expected)
    with pytest.raises(NotImplementedError, match="blocksparse does not take many gradients"):
        torch.autograd.grad(out, given, many, is_grads_batched=True)


def test_a_shape_is_computed_without_memory():
    layout = Layout.window(40, 9, 16).to("meta")
    q, k, v = (torch.empty(2, 4, 40, dim, device="meta") for dim in (8, 8, 5))
    assert blocksparse(q, k, v, layout).shape == (2, 4, 40, 5)


def test_dense_layouts_are_sent_to_sdpa():
    layout = Layout.from_blocks(torch.ones(2, 2).bool(), 16)
    q, k, v = operands(Pattern(layout, layout.token_mask()))
    assert blocksparse_report(q, k, v, layout).path == "SDPA"
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(blocksparse(q, k, v, layout), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q.float(), k, v), TypeError, "have the dtypes"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), TypeError, "must have one of"),
        (lambda q, k, v: (q[0], k, v), ValueError, "have the shapes"),
        (lambda q, k, v: (q, k[..., :5], v), ValueError, "have the shapes"),
        (lambda q, k, v: (q[:, :3], k, v), ValueError, "multiple of the KV heads"),
        (lambda q, k, v: (q[:, :, :39], k, v), ValueError, "q has 39 tokens"),
        (lambda q, k, v: (q, k[:, :, :39], v[:, :, :39]), ValueError, "k has 39 tokens"),
        (lambda q, k, v: (q, k.to("meta"), v), ValueError, "must be on one device"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, error: type[Exception], message: str):
    layout = Layout.window(40, 9, 16)
    q, k, v = operands(Pattern(layout, layout.token_mask()))
    with pytest.raises(error, match=message):
        blocksparse(*change(q, k, v), layout)


@pytest.mark.parametrize("shape", [(39,), (3, 40), (3, 4, 40), (1, 1, 4, 40), ()])
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]):
    layout = Layout.window(40, 9, 16)
    q, k, v = operands(Pattern(layout, layout.token_mask()))
    for call in (blocksparse, blocksparse_report):
        with pytest.raises(ValueError, match="bias has the shape"):
            call(q, k, v, layout, bias=torch.zeros(shape))


def test_a_scale_that_would_get_no_gradient_is_refused():
    q = torch.zeros(1, 4, 40, 16)
    with pytest.raises(TypeError, match="scale is a tensor"):
        blocksparse(q, q, q, Layout.window(40, 9, 16), scale=torch.tensor(1.0))  # pyright: ignore


def test_what_is_no_layout_is_refused():
    q = torch.zeros(1, 2, 16, 8)
    for function in (blocksparse, blocksparse_report):
        with pytest.raises(TypeError, match="layout is None, but must be a Layout: make one"):
            function(q, q, q, None)
        layout = Layout.causal(16, 16)
        with pytest.raises(TypeError, match=r"scale is a tensor"):
            function(q, q, q, layout, scale=torch.tensor(1.0))
        with pytest.raises(TypeError, match="scale is 'a', but must be a number"):
            function(q, q, q, layout, scale="a")
        with pytest.raises(TypeError, match="v is list, but must be a tensor"):
            function(q, q, [q], layout)
        with pytest.raises(TypeError, match="bias is list, but must be a tensor"):
            function(q, q, q, layout, bias=[0.0] * 16)


def test_autocast_does_not_cast_what_is_refused_without():
    q = torch.zeros(1, 2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for each in (q.int(), q.cfloat()):
            with pytest.raises(TypeError, match="q, k and v have the dtypes"):
                blocksparse(each, each, each, Layout.causal(16, 16))


def test_layouts_of_other_lengths_and_heads_are_refused():
    q, k, v = (torch.zeros(1, 4, 40, 16) for _ in range(3))
    with pytest.raises(ValueError, match="has 40 tokens, but layout has 2 blocks of 16"):
        blocksparse(q, k, v, Layout.causal(32, 16))
    with pytest.raises(ValueError, match="layout has 3 heads"):
        blocksparse(q, k, v, Layout.bigbird(40, 16, heads=3))


@pytest.fixture(params=["C++", "torch"])
def path(request, monkeypatch) -> str:
    """Both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "_library", lambda: None)
    return request.param


@pytest.mark.parametrize("dim", [3, 16])
def test_gradients_are_those_of_differences(path: str, dim: int):
    layout = Layout.from_blocks(torch.tensor([[1, 0], [0, 0], [1, 1]]).bool(), 16, causal=True)
    shapes = [(1, 4, 36, dim), (1, 2, 20, dim), (1, 2, 20, dim), (4, 20)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(*given: Tensor) -> Tensor:
        return blocksparse(*given[:3], layout, bias=given[3], scale=0.7)

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def test_the_operators_keep_the_rules_of_torch(path: str):
    pattern = documents([20, 9], 16, True, None)
    q, k, v, bias = operands(pattern, dim=8, has_bias=True, dtype=torch.float32)
    v = v.detach().mT.contiguous().mT.requires_grad_()
    layout = pattern.layout
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for each in (bias, None):
        rest = (each, list(layout.arrays), layout.block, 0.3)
        torch.library.opcheck(blocksparse_forward, (q, k, v, *rest), test_utils=tests)
        given = [t.detach() for t in (q, k, v)]
        out, lse = blocksparse_forward(*given, *rest)
        arguments = (torch.ones_like(out), *given, out, lse, *rest)
        torch.library.opcheck(blocksparse_backward, arguments, test_utils=tests)


def test_compiled_graphs_have_the_operator_whole(path: str):
    pattern = documents([20, 9], 16, True, None)
    given = operands(pattern, dim=8, has_bias=True, dtype=torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return blocksparse(q * 2, k, v, pattern.layout, bias=bias).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*given), run(*given)
    assert torch.equal(out, expected)
    for found, wanted in zip(gradients(out, given), gradients(expected, given), strict=True):
        assert torch.equal(found, wanted)


def test_graphs_of_open_shapes_have_biases_and_heads():
    mask = torch.ones(4, 2, 2, dtype=torch.bool).tril()
    layout = Layout.from_blocks(mask, 16)
    q, k, v = torch.rand(3, 2, 4, 32, 8)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return blocksparse(q, k, v, layout, bias=bias)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    for bias in (torch.rand(32), torch.rand(2, 4, 32)):
        assert torch.equal(compiled(q, k, v, bias), run(q, k, v, bias))


def test_autocast_computes_in_its_dtype():
    pattern = documents([20, 9], 16, True, None)
    q, k, v = operands(pattern, dim=8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = blocksparse(q, k, v, pattern.layout)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, blocksparse(*(each.bfloat16() for each in (q, k, v)), pattern.layout))
    assert all(each.dtype == torch.float32 for each in gradients(out, [q, k, v]))


def test_flops_are_those_of_listed_blocks():
    layout = Layout.documents([32, 32], 16, causal=False)  # 8 blocks of 16 x 16
    q, k, v = operands(Pattern(layout, layout.token_mask()), batch=3, dim=8, value_dim=24)
    pairs = 3 * 4 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counter:
        blocksparse(q, k, v, layout).sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (8 + 24) + 2 * pairs * (3 * 8 + 2 * 24)
    report = blocksparse_report(q, k, v, layout)
    assert report.forward_flops == 2 * pairs * (8 + 24)
    assert report.backward_flops == 2 * pairs * (3 * 8 + 2 * 24)
    assert report.num_blocks == 96 and report.density == 0.5


def test_the_report_says_the_path_and_the_reason(path: str):
    q, k, v = (torch.zeros(1, 4, 100, 16) for _ in range(3))
    report = blocksparse_report(q, k, v, Layout.window(100, 9))
    assert report.path == path
    assert "compiler" in report.reason or path == "C++"
    assert "path" in str(report)
    assert blocksparse_report(q, k, v, Layout.causal(100), bias=torch.zeros(100)).path == path


@pytest.mark.parametrize("is_wide", [False, True])
def test_causal_calls_of_float32_are_sent_to_sdpa_without_wide_registers(
    path: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
):
    capability = "AVX512" if is_wide else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for dtype in (torch.float16, torch.float32):
        q = torch.zeros(1, 4, 100, 16, dtype=dtype)
        report = blocksparse_report(q, q, q, Layout.causal(100))
        assert report.path == ("C++" if is_wide and path == "C++" else "SDPA")
        assert "causal" in report.reason if report.path == "SDPA" else "blocks" in report.reason


def test_causal_calls_are_sent_to_sdpa_where_it_is_faster():
    layout, given = Layout.causal(100), operands(documents([100], 64, True, None))
    q, k, v = (each.bfloat16() for each in given)
    report = blocksparse_report(q, k, v, layout)
    assert report.path == "SDPA" and "faster in torch.bfloat16" in report.reason
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert torch.equal(blocksparse(q, k, v, layout), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [-1.3, 0.0])
def test_causal_calls_whose_scale_is_not_positive(path: str, scale: float, dtype: torch.dtype):
    layout = Layout.causal(64, 16)
    q, k, v = (torch.randn(1, 2, 64, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    assert blocksparse_report(q, k, v, layout, scale=scale).path == path
    scores = (scale * q.double() @ k.double().mT).masked_fill(~layout.token_mask(), -torch.inf)
    expected = scores.softmax(-1) @ v.double()
    found = blocksparse(q, k, v, layout, scale=scale).double()
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    mine, theirs = (torch.autograd.grad(each.sum(), (q, k, v)) for each in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_nothing_is_computed_for_an_empty_batch(path: str):
    layout = Layout.window(40, 9, 16)
    q, k, v = (torch.zeros(0, 4, 40, 16, requires_grad=True) for _ in range(3))
    out = blocksparse(q, k, v, layout)
    assert out.shape == (0, 4, 40, 16)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
