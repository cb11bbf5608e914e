"""Where fake kernels promise something else than the real ones give, and what is true.

A result of the wrong size would be overwritten by its neighbour in an arena, silently. `run`
compares every result with its promise; what it found is corrected here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")


def corrected(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """Return what a real kernel would have returned, as fake tensors.

    Args:
        func: The operator that ran on fake tensors.
        args: Its arguments.
        result: What it returned.

    Returns:
        The result, with workspaces of their real size.
    """
    if func._opname in _NORMS and args[0].device.type == "cpu":
        return _with_statistics(args, result)
    if func is aten.mkldnn_rnn_layer.default:
        shapes = tuple(tuple(tensor.shape) for tensor in args[:7])
        num_bytes = _rnn_workspace_bytes(shapes, args[0].dtype, tuple(args[9:]))
        return (*result[:3], torch.empty(num_bytes, dtype=torch.uint8))
    return result


def _with_statistics(args: tuple[Any, ...], result: Any) -> Any:
    """On the CPU a norm of half precision keeps statistics in the precision of its weights."""
    weight = next((each for each in args[1:3] if isinstance(each, torch.Tensor)), None)
    if weight is None or weight.dtype == args[0].dtype:
        return result
    return (result[0], *(statistic.to(weight.dtype) for statistic in result[1:]))


@functools.cache
def _rnn_workspace_bytes(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: tuple[Any, ...]
) -> int:
    """Run the layer once on zeros: oneDNN alone knows how much it writes down for the backward.

    The fake kernel says none. Gradient mode is on, as otherwise it writes nothing down.
    """
    with no_dispatch(), torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        results = aten.mkldnn_rnn_layer.default(*zeros, False, [], *options)
    return 0 if results[3] is None else results[3].numel()
