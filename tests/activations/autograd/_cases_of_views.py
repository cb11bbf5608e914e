"""Views, and in-place changes of what has been saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import grad

from _cases import CASES, F64, case, error_of, leaf, wave


@case
def chains_of_views_and_in_place_changes():
    x = leaf(6, 4)
    hidden = x * 2
    hidden[1:3].mul_(3)
    hidden.view(4, 6)[:, ::2].exp_()
    first, second = hidden.split(3)
    product = first * second.sin()
    product.t()[1].copy_(x[0, :3])
    product.diagonal().add_(x[0, :3])
    product.select(0, 1)[None].squeeze(0).sigmoid_()
    return grad((product * product.t()[..., None].expand(4, 3, 4).sum(-1).t()).sum(), x)


@case
def in_place_change_of_a_base_after_a_view_was_saved():
    x = leaf()
    base = x * 1
    saved = base[0].sin()
    other = base[1:].cos()
    base[3].zero_()  # one version counter for all views: even disjoint rows
    return error_of(lambda: grad(saved.sum(), x)), error_of(lambda: grad(other.sum(), x))


def _in_place_error(change: Callable[[torch.Tensor], object], *, in_graph: bool = False) -> Any:
    x = leaf(6, 6)
    hidden = x * 1
    out = hidden.sin().sum()
    with torch.set_grad_enabled(in_graph):
        change(hidden)
    return error_of(lambda: grad(out, x)), hidden.sum()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(x + 1),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.zeros(6, dtype=F64)),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.0),
    "view": lambda x: x[2:, 1].mul_(2),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 7), 3).zero_(),
    "detach": lambda x: x.detach().zero_(),
    "transpose": lambda x: x.t_(),
    "resize": lambda x: x.detach().resize_(7, 7),
    "set": lambda x: x.detach().set_(torch.zeros(6, 6, dtype=F64)),
    "out": lambda x: torch.sin(torch.ones(6, 6, dtype=F64), out=x.detach()),
    "numpy": lambda x: x.detach().numpy().fill(1),  # not noticed, by stock neither
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "random": lambda x: nn.init.uniform_(x),
}

for _label, _change in CHANGES.items():
    CASES[f"in_place_change_by_{_label}"] = functools.partial(_in_place_error, _change)
CASES["in_place_change_in_the_graph"] = functools.partial(
    _in_place_error, lambda x: x.mul_(2), in_graph=True
)


@case
def in_place_change_of_a_tensor_without_history():
    x, mask = leaf(), torch.rand(6, 5, dtype=F64)
    first = (x * mask).sum()
    mask.mul_(2)
    second = (x * mask).sum()
    return error_of(lambda: grad(first, x)), grad(second, x)


@case
def tensor_saved_at_two_versions():
    x = leaf()
    hidden = x * 1
    first = hidden.sin()
    with torch.no_grad():
        hidden.mul_(2)
    second = (hidden.sin() * hidden.cos()).sum()
    del hidden  # only the graphs have the bytes
    return error_of(lambda: grad(first.sum(), x)), grad(second, x)


@case
def tensor_saved_before_and_after_a_change_that_no_counter_sees():
    x = leaf()
    hidden = x * 1
    first = (hidden.data * x).sum()
    hidden.data.mul_(3)
    second = (hidden.data * x).sum()
    del hidden, first
    return grad(second, x)


@case
def in_place_operators_that_need_their_result_or_input():
    x = leaf()
    result = (x * 1).mul_(x * 2).exp_() + (x * 1).sigmoid_() * (x * 1).tanh_()
    before = (x * 1).pow_(2) + (x * 1).clamp_(min=0.5) + (x * 1).sin_() + (x * 1).div_(x * 3)
    out = result.square_() * before.hypot_(x)
    out = nn.functional.dropout(nn.functional.silu(out, inplace=True), 0.3, inplace=True)
    return grad(nn.functional.leaky_relu_(out - 1).sum(), x)


@case
def in_place_errors_of_leaves_and_of_views_of_them():
    x = leaf()
    out = wave(x)
    with torch.no_grad():
        made_without_graph = x[0]
    errors = [
        error_of(lambda: x.add_(1)),
        error_of(lambda: x[0].zero_()),
        error_of(lambda: x.expand(2, 6, 5).mul_(2)),
        error_of(lambda: made_without_graph.mul_(2)),
        error_of(lambda: (x * 1).unbind()[0].mul_(2)),
        error_of(lambda: (x * 1).resize_(3)),
        error_of(lambda: (x * 1).set_(torch.zeros(2, dtype=F64))),
    ]
    return errors, grad(out.sum(), x)


@case
def leaf_changed_without_grad():
    x = leaf()
    spoiled, linear = (x.sin() * 1).sum(), (x * 3).sum()
    with torch.no_grad():
        x.add_(1)
    return error_of(lambda: grad(spoiled, x)), grad(linear, x), grad(wave(x).sum(), x)


@case
def overlapping_expanded_and_strided_views():
    x = leaf(6, 6)
    hidden = x * 1
    windows = hidden.unfold(0, 3, 1).sin() * hidden.as_strided((4, 6, 3), (6, 1, 2))
    diagonal = hidden.diagonal().exp() * hidden.expand(2, 6, 6).transpose(1, 2)[1, ::2, 3:].sum()
    flat = hidden.t().reshape(-1)[3::5].cos() * hidden.flip(0).rot90()[0, 0]
    return grad(windows.sum() + diagonal.sum() + flat.sum(), x)


@case
def views_of_another_dtype():
    x = leaf(6, 4)
    hidden = x * 1
    as_complex = torch.view_as_complex(hidden.view(6, 2, 2))
    numbers = as_complex * as_complex.conj().sin()
    back = torch.view_as_real(numbers * numbers.mH.mT.imag)
    return grad((back * hidden.detach().view(torch.int64).view(6, 2, 2).double()).sum(), x)


@case
def channels_last_keeps_its_strides():
    x, weight = leaf(2, 3, 8, 8), leaf(4, 3, 3, 3)
    hidden = (x * 1).to(memory_format=torch.channels_last)
    out = nn.functional.conv2d(hidden, weight * 1).relu()
    return grad(nn.functional.max_pool2d(out, 2).square().sum(), (x, weight)), out.stride()


@case
def memory_that_belongs_to_somebody_else():
    x = leaf(3, dtype=torch.float32)
    odd = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=4, count=3).fill_(3)
    shared = torch.arange(3.0).share_memory_()
    numpy = torch.from_numpy(torch.arange(3.0).numpy())
    window = torch.arange(1000.0)[500:503]
    return grad((x * odd * shared * numpy * window * (x * 1)).sum(), x)


@case
def parameter_that_is_freed_and_filled_again():
    """As FSDP2 does between the forward and the backward pass."""
    x, weight = leaf(), leaf(5, 5)
    out = wave((x * 1) @ weight).sum()
    content, storage = weight.detach().clone(), weight.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(num_bytes)
    torch.autograd._unsafe_preserve_version_counter(weight).__enter__()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(content)
    return grad(out, (x, weight))


@case
def parameter_whose_data_is_replaced():
    """As ZeRO-3 does: a gathered parameter is let go and gathered again."""
    x, weight = leaf(), leaf(5, 5)
    out = ((x * 1) @ weight).sum()
    weight.data = weight.data * 2
    return grad(out, x)
