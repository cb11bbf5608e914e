"""Custom autograd functions and operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable

from _cases import SavesAll, case, error_of, leaf, wave


@case
def function_that_saves_input_intermediate_output_and_none():
    x = leaf()
    first = grad(SavesAll.apply(x * 1, 3).sum(), x, create_graph=True)[0]
    return first, grad(first.square().sum(), x)


@case
def function_with_setup_context():
    class Product(Function):
        @staticmethod
        def forward(x, y):
            return x * y, x + y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs, *output)

        @staticmethod
        def backward(ctx, product_gradient, sum_gradient):
            x, y, product, _ = ctx.saved_tensors
            shared = sum_gradient * product.sign()
            return product_gradient * y + shared, product_gradient * x + shared

    x, y = leaf(), leaf()
    product, total = Product.apply(x * 1, y * 1)
    return grad((product * total).sum(), (x, y), create_graph=True)


@case
def function_that_is_once_differentiable():
    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * gradient * x.square()

    x = leaf()
    first = grad(Cube.apply(x * 1).sum(), x, create_graph=True)[0]
    return first.detach(), error_of(lambda: grad(first.sum(), x))


@case
def function_that_works_in_place():
    class ExpInPlace(Function):
        @staticmethod
        def forward(ctx, x):
            x.exp_()
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    x = leaf()
    hidden = x * 1
    spoiled = hidden.cos()
    out = ExpInPlace.apply(hidden)
    return grad(out.sum(), x, retain_graph=True), error_of(lambda: grad(spoiled.sum(), x))


@case
def function_with_outputs_that_have_no_gradient():
    class Sort(Function):
        @staticmethod
        def forward(ctx, x):
            values, index = x.sort(dim=0)
            ctx.mark_non_differentiable(index)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(index, x)
            return values, index, x.exp()

        @staticmethod
        def backward(ctx, gradient, index_gradient, exp_gradient):
            assert index_gradient is None and exp_gradient is None
            index, x = ctx.saved_tensors
            return torch.zeros_like(x).scatter(0, index, gradient)

    x = leaf()
    values, index, _ = Sort.apply(x * 1)
    return grad((values * values).sum(), x), index


@case
def function_with_materialized_gradients():
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx, sin_gradient, cos_gradient):
            (x,) = ctx.saved_tensors
            return sin_gradient * x.cos() - cos_gradient * x.sin()

    x = leaf()
    return grad(Two.apply(x * 1)[0].sum(), x), grad(Two.apply(x * 1)[1].sum(), x)


@case
def function_that_returns_its_input_or_a_view():
    class Itself(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    class FirstRow(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x[0])
            return x[0]

        @staticmethod
        def backward(ctx, gradient):
            x, row = ctx.saved_tensors
            return x * gradient + row

    x = leaf()
    return grad(Itself.apply(x * 1).sum() + FirstRow.apply(x * 1).sum(), x)


@case
def function_that_fails_and_is_tried_again():
    attempts = []

    class Flaky(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            attempts.append(x.sum())
            if len(attempts) == 1:
                raise KeyError("first attempt")
            return 2 * gradient * x

    x = leaf()
    loss = wave(Flaky.apply(x * 1)).sum()
    error = error_of(lambda: grad(loss, x, retain_graph=True))
    return error, grad(loss, x), attempts


@case
def function_whose_forward_fails_after_saving():
    class Broken(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            raise KeyError("in forward")

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    x = leaf()
    hidden = wave(x)
    return error_of(lambda: Broken.apply(hidden)), grad(hidden.sum(), x)


@case
def function_that_computes_its_gradients_in_forward():
    """As fused losses do; what backward returns may become a leaf's `.grad` itself."""

    class Fused(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x.cos() * y, x.sin())
            return (x.sin() * y).sum()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors

    x, y = leaf(), leaf()
    for _ in range(2):
        Fused.apply(x, y).backward()
    kept = Fused.apply(x, y)
    errors = [error_of(lambda: kept.backward(retain_graph=True)) for _ in range(2)]
    return x.grad, y.grad, errors


@case
def function_that_changes_a_saved_tensor_in_backward():
    class Careless(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.saved_tensors[0].mul_(10)
            return gradient * 2

    x = leaf()
    hidden = x * 1
    loss = hidden.sin().sum()
    loss = loss + Careless.apply(hidden).sum()
    return error_of(lambda: grad(loss, x))


@case
def function_with_a_backward_pass_in_its_backward():
    class Recomputed(Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.save_for_backward(x)
            ctx.depth = depth
            return wave(x)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                out = Recomputed.apply(x * 1, ctx.depth - 1) if ctx.depth else wave(x)
            return grad(out, x, gradient)[0], None

    x = leaf()
    return grad(Recomputed.apply(x * 1, 5).sum(), x)


@case
def function_with_forward_mode_and_vmap_rules():
    class Sine(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0].cos()

    x = leaf()
    with fwAD.dual_level():
        tangent = fwAD.unpack_dual(Sine.apply(fwAD.make_dual(x * 1, torch.ones_like(x)))).tangent
        first = grad(tangent.sum(), x)
    return first, grad(torch.vmap(Sine.apply)(x * 1).square().sum(), x)


@torch.library.custom_op("penstock_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, factor: float) -> torch.Tensor:
    """An operator outside of PyTorch."""
    return x.sin() * factor


def _scaled_sine_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.factor = inputs[1]


def _scaled_sine_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    x, output = ctx.saved_tensors
    return gradient * x.cos() * ctx.factor + 0 * output, None


scaled_sine.register_autograd(_scaled_sine_backward, setup_context=_scaled_sine_setup)


@case
def custom_operator():
    x = leaf()
    first = grad(scaled_sine(x * 1, 2.5).sum(), x, create_graph=True)[0]
    return first, grad(first.sum(), x)
