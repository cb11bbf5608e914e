"""Hooks on the graph's nodes, looking at what has been saved, and other hooks than ours."""

from __future__ import annotations

import torch
from torch.autograd import grad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)

from _cases import SavesAll, case, error_of, leaf, same_one, wave


@case
def tensor_hooks():
    x, seen = leaf(), []
    hidden = wave(x)
    factor = hidden.detach().clone()  # a hook that held `hidden` itself would never be freed
    hidden.retain_grad()
    hidden.register_hook(lambda gradient: gradient * factor)
    removed = hidden.register_hook(lambda gradient: gradient * 100)
    removed.remove()
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    hidden.sin().sum().backward()
    return seen, hidden.grad, x.grad


@case
def node_hooks():
    x, seen = leaf(), []
    out = wave(x)
    factor = out.detach().clone()
    out.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 2,))
    out.grad_fn.register_prehook(lambda outputs: (outputs[0] * factor,))
    out.grad_fn.next_functions[0][0].register_prehook(lambda g: seen.append(g[0].clone()))
    handle = register_multi_grad_hook((out, x), lambda gradients: seen.extend(gradients))
    out.grad_fn.metadata["note"] = 1
    out.sum().backward()
    handle.remove()
    return seen, x.grad, out.grad_fn.name(), out.grad_fn.metadata


@case
def hooks_that_raise():
    x = leaf()
    out = wave(x)

    def refuse(gradient: torch.Tensor) -> None:
        raise KeyError("a hook")

    handle = out.register_hook(refuse)
    error = error_of(lambda: out.sum().backward(retain_graph=True))
    handle.remove()
    return error, grad(out.sum(), x)


@case
def hooks_that_run_a_backward_pass():
    x = leaf()
    out, other = wave(x), wave(x * 2).sum()
    inner = []
    out.register_hook(lambda _: inner.extend(grad(other, x, retain_graph=True)))
    torch.autograd.backward(out.sum(), inputs=[x])
    return x.grad, inner, grad(other, x)


@case
def hooks_that_look_at_saved_tensors():
    x, seen = leaf(), []
    out = wave(x)
    look = lambda _: seen.append(out.grad_fn._saved_result.clone())  # noqa: E731
    handle = out.grad_fn.register_prehook(look)
    gradient = grad(out.sum(), x)
    handle.remove()
    return gradient, seen


@case
def callbacks_queued_in_the_engine():
    x, seen = leaf(), []
    out = wave(x)
    out.register_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(x.grad.clone())
        )
    )
    out.sum().backward()
    return seen, x.grad


# ---------------------------------------------------- looking at what has been saved


@case
def saved_attributes():
    x = leaf()
    hidden = x * 1
    out = hidden.exp()
    product = torch.mm(hidden.t(), hidden.sin())
    node, mm = out.grad_fn, product.grad_fn
    seen = [node._saved_result, mm._saved_self, mm._raw_saved_self.unpack(), mm._saved_mat2]
    gradients = grad(out.sum() + product.sum(), x)
    errors = [
        error_of(lambda: node._saved_result),
        error_of(lambda: mm._raw_saved_self.unpack()),
        error_of(lambda: mm._saved_self),
    ]
    return [value.detach() for value in seen], gradients, errors


@case
def saved_attributes_that_are_lists():
    x = leaf(6, 5, 4)
    rows, mask = torch.tensor([3, 0, 3]), torch.tensor([True, False, True, False])
    out = (x * 1)[rows, :, mask.nonzero()[0]]
    indices = out.grad_fn._saved_indices
    stack = torch.stack([x[0] * 2, x[1] * 3]).prod(0)
    return indices, grad(out.square().sum() + stack.sum(), x)


@case
def saved_attributes_of_a_custom_function():
    x = leaf()
    out = SavesAll.apply(x * 1, 2)
    saved = out.grad_fn.saved_tensors
    raw = out.grad_fn._raw_saved_tensors[0].unpack()
    gradient = grad(out.sum(), x)
    tensors = [item.detach() for item in (*saved, raw) if item is not None]
    return tensors, gradient, error_of(lambda: out.grad_fn.saved_tensors)


@case
def saved_tensors_know_their_history():
    x = leaf()
    out = (x * 1).exp()
    saved = out.grad_fn._saved_result
    return grad(saved.sum(), x, retain_graph=True), saved.grad_fn is not None, grad(out.sum(), x)


# ------------------------------------------------------------------ other hooks


@case
def other_hooks_inside():
    x, seen = leaf(), []
    with saved_tensors_hooks(lambda t: (seen.append(t.shape), t.clone())[1], same_one):
        inner = wave(x).sum()
    return grad(inner, x), seen


@case
def other_hooks_before_and_after():
    x = leaf()
    first = wave(x)
    with saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1):
        second = first.sin()
    return grad((second.cos() * first).sum(), x)


@case
def save_on_cpu_inside():
    x = leaf()
    with save_on_cpu():
        return grad(wave(x).sum(), x)


@case
def mutation_of_saved_tensors_is_allowed():
    x = leaf()
    with allow_mutation_on_saved_tensors():
        hidden = x * 1
        out = hidden.sin().sum()
        hidden.mul_(2)
        return grad(out, x)
