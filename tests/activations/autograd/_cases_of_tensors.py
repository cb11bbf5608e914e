"""Every kind of tensor: dtypes, layouts, empty, undefined, subclasses."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import grad

from _cases import F64, case, leaf, wave


@case
def integer_boolean_and_half_tensors():
    x = leaf()
    index, mask = torch.randint(6, (9,)), torch.rand(6, 5) > 0.5
    half = (x * 1).to(torch.bfloat16).sin().to(torch.float32) * (x * 1).half().float()
    out = (x * 1)[index].exp().sum() + (x * 1)[mask].cos().sum() + half.sum()
    out = out + torch.where(mask, x * 1, x * 2).sin().sum() + (x * index[0] * mask).exp().sum()
    return grad(out + nn.functional.embedding(index % 5, x.t() * 1).square().sum(), x)


@case
def complex_tensors():
    x = leaf(6, 6, dtype=torch.complex128)
    out = (x * 1).exp() @ (x * 2).conj().sin() + torch.fft.fft2(x * 1j).mH
    first = grad(out.abs().sum(), x, create_graph=True)[0]
    return first, grad((first * out.angle()).real.sum(), x)


@case
def zero_sized_tensors_and_scalars():
    x = leaf(0, 4)
    y = leaf(1)
    scalar = torch.tensor(2.0, dtype=F64, requires_grad=True)
    out = wave(x).sum() + (x[:0] * y).sum() + (scalar * 1).exp() * (y * 1).sin().sum()
    joined = torch.cat([x * 1, leaf(3, 4) * 1]).sin().sum() + wave(leaf(3, 4)[:0]).sum()
    return grad(out + joined, (x, y, scalar), create_graph=True)


@case
def undefined_gradients():
    x, y = leaf(), leaf()
    low, high = torch.split((x * 1).sin() * (y * 1), 3)
    undefined = torch._C._functions.UndefinedGrad()((x * 1).exp())
    unused = grad(low.sum(), (x, y, leaf()), allow_unused=True, retain_graph=True)
    zeros = grad(high.sum(), (x, leaf()), materialize_grads=True, allow_unused=True)
    return unused, zeros, grad(undefined.sum(), x, allow_unused=True)


@case
def sparse_and_other_layouts():
    x, dense = leaf(4, 4), leaf(4, 4)
    out = torch.sparse.mm((x * 1).to_sparse(), dense * 1).sin().sum()
    out = out + (torch.sparse.sum((x * 1).to_sparse() * 2) * dense.sum()).exp() * 1e-9
    compressed = torch.sparse.mm((x.detach() * 1).to_sparse_csr(), wave(dense)).sum()
    single = leaf(4, 4, dtype=torch.float32)
    blocked = (single * 1).to_mkldnn().relu().to_dense().square().sum()
    return grad(out + compressed, (x, dense)), grad(blocked, single)


@case
def nested_tensors():
    x, y = leaf(3, 4), leaf(2, 4)
    nested = torch.nested.as_nested_tensor([x * 1, y * 1])
    return grad(torch.nested.to_padded_tensor(nested.relu(), 0.0).sin().sum(), (x, y))


@case
def jagged_tensors():
    x, y = leaf(3, 4), leaf(2, 4)
    nested = torch.nested.as_nested_tensor([x * 1, y * 1], layout=torch.jagged)
    return grad((nested.sin().exp() * nested).values().sum() + wave(x).sum(), (x, y))


class Tagged(torch.Tensor):
    """A subclass that adds nothing to torch.Tensor's data."""


@case
def subclass_of_tensor():
    x = leaf().detach().as_subclass(Tagged).requires_grad_()
    first = grad(wave(x).sum(), x, create_graph=True)[0]
    plain = leaf()
    return type(first).__name__, first.as_subclass(torch.Tensor), grad(wave(plain).sum(), plain)


@case
def special_values_and_bits():
    x = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-310], dtype=F64).requires_grad_()
    hidden = x * 1
    return grad((hidden * hidden.sqrt() + 1 / hidden).sum(), x), grad(wave(x).sum(), x)
