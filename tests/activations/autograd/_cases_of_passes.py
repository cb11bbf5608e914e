"""Ways to go backward: retained, partial, batched, higher order, deep; and copies."""

from __future__ import annotations

import copy
import io

import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.autograd import functional as AF
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.autograd.graph import get_gradient_edge

from _cases import F64, case, error_of, leaf, wave


@case
def a_graph_kept_many_times():
    x = leaf()
    out = wave(x)
    kept = [grad(out.sum() * k, x, retain_graph=True)[0] for k in range(6)]
    kept += grad(out.sum(), x)
    return kept, error_of(lambda: grad(out.sum(), x))


@case
def gradients_that_accumulate():
    x, y = leaf(), leaf()
    for factor in (1, 2):
        (wave(x) * y * factor).sum().backward()
    wave(y).sum().backward(inputs=[y])
    before = x.grad
    x.grad = None
    wave(x).sum().backward(create_graph=True, inputs=(x,))
    second, x.grad = x.grad, None  # else it and the graph keep each other alive
    return before, second.detach(), second.requires_grad, y.grad


@case
def chosen_inputs_inside_the_graph():
    x = leaf()
    hidden = wave(x)
    out = hidden.sin() * hidden
    edge = get_gradient_edge(hidden)
    first = grad(out.sum(), (hidden, x), retain_graph=True)
    second = grad(out.sum(), edge, retain_graph=True)
    torch.autograd.backward(out.sum(), inputs=[hidden], retain_graph=True)
    return first, second, grad(edge, x, grad_tensors(out)), hidden.grad


def grad_tensors(x: torch.Tensor) -> torch.Tensor:
    """A cotangent that is not all ones."""
    return torch.linspace(0, 1, x.numel(), dtype=x.dtype).view_as(x)


@case
def batched_gradients():
    x = leaf(4)
    out = wave(x)
    jacobian = grad(out, x, torch.eye(4, dtype=F64), is_grads_batched=True, create_graph=True)[0]
    return jacobian, grad(jacobian.square().sum(), x)


@case
def gradient_penalty():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = leaf()
    (slope,) = grad(model(x * 1).sum(), x, create_graph=True)
    loss = model(x).square().mean() + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], x.grad


@case
def third_order():
    x = leaf()
    value = wave(x).sum()
    for _ in range(2):
        (value,) = grad(value.sum(), x, create_graph=True)
    return grad(value.sum(), x)


@case
def functional_interface():
    x, y = leaf(4).detach(), leaf(4).detach()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return wave(a) * b.sin()

    def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(a, b).sum()

    return [
        AF.jacobian(function, (x, y), create_graph=True),
        AF.jacobian(function, (x, y), vectorize=True),
        AF.jacobian(function, (x, y), vectorize=True, strategy="forward-mode"),
        AF.hessian(total, (x, y)),
        AF.hessian(total, (x, y), vectorize=True, outer_jacobian_strategy="forward-mode"),
        AF.vjp(function, (x, y), y, create_graph=True),
        AF.jvp(function, (x, y), (y, x), create_graph=True),
        AF.vhp(total, (x, y), (y, x)),
        AF.hvp(total, (x, y), (y, x)),
    ]


@case
def numerical_checks():
    x, y = leaf(2), leaf(2)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return wave(a) * (b * 1).cos()

    return [
        gradcheck(function, (x, y), check_batched_grad=True, check_forward_ad=True),
        gradcheck(function, (x, y), fast_mode=True),
        gradgradcheck(function, (x, y), check_fwd_over_rev=True, check_rev_over_rev=True),
    ]


@case
def forward_mode_over_reverse_mode():
    x, tangent = leaf(), leaf()
    with fwAD.dual_level():
        out = wave(fwAD.make_dual(x * 1, tangent * 1))
        primal_part, tangent_part = fwAD.unpack_dual(out)
        (first,) = grad(primal_part.sum(), x, create_graph=True)
        second = fwAD.unpack_dual(first).tangent
        return first, second, grad(tangent_part.sum(), (x, tangent))


@case
def function_transforms_that_need_no_reverse_mode():
    x, batch = leaf(3), leaf(4, 3)

    def function(v: torch.Tensor) -> torch.Tensor:
        return wave(v * x)

    ones = torch.ones(3, dtype=F64)
    outs = [
        torch.func.vmap(function)(batch),
        torch.func.vmap(torch.func.vmap(lambda v: (v * 1).exp()))(batch),
        torch.func.jvp(function, (ones,), (ones,))[1],
        torch.func.jacfwd(function)(ones),
        torch.func.linearize(function, ones)[1](ones),
        torch.func.functionalize(lambda v: function(v).mul_(2))(ones),
    ]
    return [grad(out.square().sum(), (x, batch), allow_unused=True) for out in outs]


@case
def functional_call():
    model = nn.Linear(5, 4).double()
    state = {"weight": leaf(4, 5), "bias": leaf(4)}
    out = torch.func.functional_call(model, {k: v * 1 for k, v in state.items()}, (leaf() * 1,))
    return grad(out.sin().sum(), tuple(state.values()))


@case
def anomaly_mode():
    x = leaf()
    with torch.autograd.detect_anomaly():
        right = grad(wave(x).sum(), x)
        bad = ((x * 0).sqrt() * (x * 0)).sum()
        error = error_of(lambda: grad(bad, x))
    with torch.autograd.detect_anomaly(check_nan=False):
        unchecked = grad(((x * 0).sqrt() * (x * 0)).sum(), x)
    return right, error, unchecked


@case
def profiled_and_single_threaded():
    x = leaf()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True):  # torch 2.11 warns without
        out = grad(wave(x).sum(), x)
    with torch.autograd.set_multithreading_enabled(False):
        return out, grad(wave(x).sum(), x)


@case
def errors_of_the_engine():
    x = leaf()
    out = wave(x)
    return [
        error_of(lambda: out.backward()),
        error_of(lambda: grad(out.sum(), leaf(2))),
        error_of(lambda: grad(out, x, torch.ones(3, dtype=F64))),
        error_of(lambda: grad(out.detach().sum(), x)),
        grad(out.sum(), x),
    ]


@case
def deep_graph():
    x = leaf(2)
    out = x * 1
    for _ in range(300):  # more than one prefetch looks at
        out = out.sin()
    return grad(out.sum(), x)


# ------------------------------------------------------------------------ copies


@case
def copies_while_a_graph_is_alive():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double()
    x = leaf()
    out = model(x * 1)
    twin, stream = copy.deepcopy(model), io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    restored = torch.load(stream)
    error = error_of(lambda: copy.deepcopy(out)).split("\n")[0]
    twin(x).sum().backward()
    out.sum().backward()
    gradients = [p.grad for m in (model, twin) for p in m.parameters()]
    return gradients, list(restored.values()), error, copy.deepcopy(x).grad
