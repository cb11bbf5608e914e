"""No operator drops a tangent in silence, and what is no operand has an error that says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.ops import (
    GroupRational,
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


def test_what_is_no_pattern_is_refused():
    with pytest.raises(TypeError, match="pattern is Tensor: make it by product_pattern"):
        spgemm(EYE, EYE, pattern=EYE)


def test_activations_that_cannot_be_fitted_are_refused():
    with pytest.raises(TypeError, match="activation is 'relu', but must be a function"):
        GroupRational(2, activation="relu")
    with pytest.raises(ValueError, match=r"not finite, elementwise, between -4\.0 and 4\.0"):
        GroupRational(2, activation=torch.log)


def test_gradients_of_one_operand_alone_are_those_of_both():
    a, b = (torch.rand(6, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    sparse = [each.where(each > 0.5, 0).to_sparse_csr().requires_grad_() for each in (a, b)]
    both = torch.autograd.grad(spgemm(*sparse).values().sum(), sparse)
    left = torch.autograd.grad(spgemm(sparse[0], sparse[1].detach()).values().sum(), sparse[0])
    right = torch.autograd.grad(spgemm(sparse[0].detach(), sparse[1]).values().sum(), sparse[1])
    for found, wanted in zip((*left, *right), both, strict=True):
        assert torch.equal(found.values(), wanted.values())
