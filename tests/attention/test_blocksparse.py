"""Attention over blocks is attention by its definition, in its values and its gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Pattern, dense_attention, operands, patterns
from penstock.attention import _torch


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
        out, lse = _torch.forward(q, k, v, pattern.layout, bias, 0.3)
        dout = torch.randn_like(out)
        found = _torch.backward(dout, q, k, v, out, lse, pattern.layout, bias, 0.3)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    seen = pattern.mask.any(-1).expand(lse.shape)
    assert torch.equal(lse == -torch.inf, ~seen)
    wanted = torch.autograd.grad(expected, given, dout)
    for each, gradient in zip(found, wanted, strict=False):
        assert each is not None
        assert torch.allclose(each, gradient, rtol=0, atol=1e-11)
