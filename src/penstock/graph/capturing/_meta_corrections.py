"""Corrections of fake kernels, where they promise something else than the real ones give.

A result of the wrong size would be overwritten by its neighbour in an arena, silently. `run`
compares every result with its promise; the differences that it found are corrected here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from penstock.compat.autograd import below_autograd
from penstock.compat.dispatch import OpOverload, no_dispatch
from penstock.compat.fake_tensors import make_contiguous_strides_for, suggest_memory_format

aten = torch.ops.aten
_LAID_OUT_LIKE = {
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), 0
    ),
    **dict.fromkeys(("native_batch_norm_backward", "native_group_norm_backward"), 1),
    "native_layer_norm_backward": None,
    **dict.fromkeys(("native_dropout", "normal"), 0),
}
"""CPU kernels whose first result has the memory format of an operand, or is contiguous (None)."""
_ELEMENTWISE = (
    *("log_sigmoid_forward", "log_sigmoid_backward", "softplus_backward", "elu_backward"),
    *("gelu_backward", "silu_backward", "mish_backward", "sigmoid_backward", "tanh_backward"),
    *("leaky_relu_backward", "threshold_backward", "hardtanh_backward", "hardswish_backward"),
    *("hardsigmoid_backward", "hardshrink_backward", "softshrink_backward", "logit_backward"),
    *("mse_loss_backward", "huber_loss_backward", "smooth_l1_loss_backward"),
)
"""Operators that work element by element without being marked so."""
_EFFICIENT_ATTENTION = ("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
"""Outside of recordings these give seed and offset of their dropout, results 2 and 3, on the CPU,
where their gradients read them."""
_SCATTERS = ("diagonal_scatter", "select_scatter", "slice_scatter", "as_strided_scatter")
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")


def correct_results(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Return the results that a real kernel has for a call, as fake tensors.

    Workspaces among the results have their real sizes, and each result is another tensor.
    """
    result = _separate(result)
    if func._opname in _NORMS and args[0].device.type == "cpu":
        result = _correct_statistics(args, result)
    if func._opname in _LAID_OUT_LIKE:
        first, *others = result if isinstance(result, tuple) else (result,)
        if isinstance(first, torch.Tensor) and first.device.type == "cpu":
            first = _correct_layout(func._opname, args, first)
        return (first, *others) if isinstance(result, tuple) else first
    if func._opname in _EFFICIENT_ATTENTION:
        seed, offset = (torch.empty((), dtype=each.dtype, device="cpu") for each in result[2:4])
        return (*result[:2], seed, offset, *result[4:])
    if func._opname in ("max_unpool2d", "max_unpool3d"):
        return result.contiguous(memory_format=suggest_memory_format(args[0]))
    if func._opname in _SCATTERS and _is_expanded(result):  # in torch 2.11, as its operand is
        return torch.empty_like(args[0])
    if func is aten.mkldnn_rnn_layer.default:
        shapes = tuple(tuple(tensor.shape) for tensor in args[:7])
        num_bytes = _rnn_workspace_bytes(shapes, args[0].dtype, tuple(args[9:]))
        return (*result[:3], torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    if func.namespace == "aten" and not func._schema.is_mutable:
        return _correct_layouts_by_trial(func, args, kwargs, result)
    return result


def _correct_layout(name: str, args: tuple[Any, ...], first: torch.Tensor) -> torch.Tensor:
    """Lay out the first result of one of these operators as the real kernel does."""
    position = _LAID_OUT_LIKE[name]
    memory_format: torch.memory_format | None = torch.contiguous_format
    if position is not None:
        if not isinstance(args[position], torch.Tensor):
            return first
        memory_format = _memory_format(args[position])
        if name == "native_batch_norm_backward":
            suggested = [suggest_memory_format(each) for each in args[:2]]
            memory_format = memory_format if suggested[0] == suggested[1] else suggested[1]
        if memory_format is None and name == "native_dropout":
            return first  # it keeps strides without a memory format; others are contiguous then
    return torch.empty(
        first.shape,
        dtype=first.dtype,
        device=first.device,
        memory_format=memory_format or torch.contiguous_format,
    )


def _correct_layouts_by_trial(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Run the operator itself on small operands, where these are not contiguous.

    Fake kernels that are made of others choose another operand for the result's layout, and a sum
    over it then adds in another order.
    """
    results = result if isinstance(result, tuple) else (result,)
    if not isinstance(results[0], torch.Tensor) or results[0].device.type != "cpu":
        return result
    shape = results[0].shape
    full = [each for each in args if isinstance(each, torch.Tensor) and each.shape == shape]
    is_elementwise = torch.Tag.pointwise in func.tags or func._opname in _ELEMENTWISE
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_plain = is_elementwise and not is_random
    is_plain = is_plain and not any(isinstance(each, torch.Tensor) for each in kwargs.values())
    # Where a size is one, strides of any layout are contiguous, and kernels depend on them.
    is_canonical = all(each.stride() == make_contiguous_strides_for(shape) for each in full)
    if is_canonical or not is_plain:
        return result
    with no_dispatch(), below_autograd():
        small = [_make_small(each) if isinstance(each, torch.Tensor) else each for each in args]
        try:
            found = func(*small, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return result  # its result is as the fake kernel has it
        found = found if isinstance(found, tuple) else (found,)
        strides = [
            _dense_strides(tuple(each.shape), true.stride())
            for each, true in zip(results, found, strict=True)
        ]
    made = tuple(
        each
        if each.shape != shape or each.stride() == true
        else torch.empty_strided(each.shape, true, dtype=each.dtype, device=each.device)
        for each, true in zip(results, strides, strict=True)
    )
    return made if isinstance(result, tuple) else made[0]


def _make_small(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of at most two elements a dimension, with dimensions in this order."""
    shape = tuple(min(size, 2) for size in tensor.shape)
    made = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
    return made.as_strided(shape, _dense_strides(shape, tensor.stride()))


def _dense_strides(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of a dense tensor whose dimensions lie in the order of other strides."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        if like[dim]:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides)


def _is_expanded(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in sizes)


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format in which its elements lie, contiguous before others; None: none."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


def _correct_statistics(args: tuple[Any, ...], result: Any) -> Any:
    """Give statistics of a norm in half precision the dtype of its weights, as CPU kernels do."""
    weight = next((each for each in args[1:3] if isinstance(each, torch.Tensor)), None)
    if weight is None or weight.dtype == args[0].dtype:
        return result
    return (result[0], *(statistic.to(weight.dtype) for statistic in result[1:]))


def _separate(result: Any) -> Any:
    """Make each result a tensor of its own.

    A recurrent layer's gradient names one tensor for both of its biases, until torch's cache of
    fake results makes two of it; two captures have to be alike.
    """
    if not isinstance(result, tuple | list):
        return result
    seen: set[int] = set()
    separate = []
    for each in result:
        is_again = isinstance(each, torch.Tensor) and id(each) in seen
        seen.add(id(each))
        separate.append(torch.empty_like(each) if is_again else each)
    return type(result)(separate)


@functools.cache
def _rnn_workspace_bytes(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: tuple[Any, ...]
) -> int:
    """Run the layer once on zeros: only oneDNN can tell how much it keeps for the backward pass.

    The fake kernel says none. Gradient mode is on, as otherwise it keeps nothing.
    """
    with no_dispatch(), below_autograd(), torch.enable_grad():
        zeros = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        results = aten.mkldnn_rnn_layer.default(*zeros, False, [], *options)
    return 0 if results[3] is None else results[3].numel()
