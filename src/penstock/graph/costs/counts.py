"""Counts of an operator's costs, in whole numbers: floating-point operations and bytes.

Products of matrices, convolutions and attention are counted by the formulas of
`torch.utils.flop_counter`; everything else by elements times the operations that its formula has
for one. Bytes are those that the views touch, once: an expanded dimension costs nothing, a lookup
reads the rows that it returns and not the table.

Workspace is memory that kernels take beside their operands and results. The factors for CPUs are
bounds of the allocations that were seen in kernels of common sizes, which reorder operands into
blocks; `measure` finds a graph's own. On GPUs torch chooses another algorithm for a convolution
where memory is short.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from penstock.compat.dispatch import OpOverload
from penstock.graph.encoding import flat_results
from penstock.graph.step_graph import Operator, StepGraph


class OperatorCounts(NamedTuple):
    """Counts of one operator; its workspace is the memory beyond operands and results."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    workspace_bytes: int = 0


_WORKSPACE_DEVICE = "workspace_device"  # in metadata: the device whose workspace is declared
_NO_ARITHMETIC = {
    *("clone", "copy_", "_to_copy", "cat", "stack", "fill_", "zero_", "arange", "where"),
    *("embedding", "index", "index_select", "gather", "select_backward", "slice_backward"),
    *("constant_pad_nd", "roll", "flip", "repeat", "tril", "triu", "lift_fresh_copy"),
    *("_foreach_copy_", "index_put_", "index_put", "scatter", "masked_fill", "masked_fill_"),
    *("nll_loss_forward", "nll_loss_backward", "max_pool2d_with_indices"),
}
_OPERATIONS_PER_ELEMENT = {  # where the formula has more than one, division and exp counted as one
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "native_group_norm"), 8),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), 14),
    "native_batch_norm_backward": 12,
    "_fused_rms_norm": 5,
    "_fused_rms_norm_backward": 10,
    **dict.fromkeys(("_softmax", "_log_softmax"), 4),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 4),
    **{"gelu": 8, "gelu_backward": 14, "silu": 4, "silu_backward": 6},
    **dict.fromkeys(("sigmoid_backward", "tanh_backward"), 3),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), 3),
    **dict.fromkeys(("lerp", "lerp_", "lerp_.Scalar"), 3),
    **{"_fused_adam_": 14, "_fused_adamw_": 14, "_fused_sgd_": 6, "_fused_adagrad_": 8},
    **dict.fromkeys(("var", "var_mean"), 4),
}
_LOOKUPS = {"embedding", "index", "index_select", "gather", "take_along_dim"}
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "_foreach_copy_"}
_FLOAT = {torch.float64, torch.float32, torch.float16, torch.bfloat16}

_CPU_HALVES = {  # halves of the bytes of operands, and of results
    "convolution": (2, 2),
    "convolution_backward": (4, 4),
    "mkldnn_rnn_layer": (2, 2),
    "mkldnn_rnn_layer_backward": (2, 2),
    "native_batch_norm_backward": (1, 1),
    "upsample_bilinear2d": (2, 2),
    "upsample_bilinear2d_backward": (2, 2),
    "mse_loss": (1, 0),
}
_CUDA_HALVES = {
    "convolution": (2, 2),
    "convolution_backward": (2, 2),
    "mkldnn_rnn_layer": (2, 2),
    "mkldnn_rnn_layer_backward": (2, 2),
    "_scaled_dot_product_flash_attention_backward": (1, 0),  # a gradient is summed in float32
    "_scaled_dot_product_efficient_attention_backward": (1, 0),
    "_scaled_dot_product_cudnn_attention_backward": (1, 0),
    "mse_loss": (1, 0),
}
_MAX_ATTENTION_BYTES = 16 * 2**20  # CPU: blocks of scores, one set for each thread
_MAX_CONVOLUTION_BYTES = 256 * 2**20  # CUDA: cuDNN has algorithms below this for any convolution


def count_operator(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    written: list[torch.Tensor],
) -> OperatorCounts:
    """Count the operations and bytes of one call of an operator, which is no factory (`zeros`)."""
    name = func._opname
    inputs, outputs = _tensors(args) + _tensors(tuple(kwargs.values())), _tensors(result)
    identities = {id(tensor) for tensor in written}
    made = [tensor for tensor in outputs if id(tensor) not in identities]
    device = outputs[0].device.type if outputs else "cpu"
    read = sum(map(touched_bytes, inputs))
    if name in _LOOKUPS and inputs:
        read += sum(map(touched_bytes, outputs)) - touched_bytes(inputs[0])
    bytes_made, bytes_written = (sum(map(touched_bytes, some)) for some in (made, written))
    if name in _OVERWRITES:
        read -= bytes_written
    return OperatorCounts(
        _count_flops(func, name, args, kwargs, result, inputs, made + written),
        max(0, read),
        bytes_made + bytes_written,
        workspace_bytes(name, max(0, read), bytes_made, device),
    )


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements that a view shows, each once."""
    strides, num_bytes = tensor.stride(), tensor.dtype.itemsize
    if 0 not in strides:
        return tensor.numel() * num_bytes
    for extent, stride in zip(tensor.shape, strides, strict=True):
        if stride or not extent:
            num_bytes *= extent
    return num_bytes


def _count_flops(
    func: OpOverload,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> int:
    if name == "convolution_backward":
        return _convolution_backward_flops(args)
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if name.startswith("mkldnn_rnn_layer"):
        return _rnn_flops(args, backward=name.endswith("backward"))
    if name in _NO_ARITHMETIC:
        return 0
    tensors = [tensor for tensor in inputs + outputs if tensor.dtype in _FLOAT]
    if not tensors:
        return 0
    per_element = _OPERATIONS_PER_ELEMENT.get(name, 1)
    if name.startswith(("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return per_element * sum(tensor.numel() for tensor in _tensors((args[0],)))
    return per_element * max(tensor.numel() for tensor in tensors)


def _convolution_backward_flops(args: tuple[Any, ...]) -> int:
    """Count as many for each gradient as forward, as every product of forward is in both.

    torch's own formula forgets groups where it counts the weight's gradient.
    """
    grad_output, operand, weight, transposed, wanted = *args[:3], args[7], args[10]
    places = operand if transposed else grad_output
    forward = 2 * operand.shape[0] * math.prod(places.shape[2:]) * weight.numel()
    return forward * sum(bool(each) for each in wanted[:2])


def _rnn_flops(args: tuple[Any, ...], *, backward: bool) -> int:
    """Count two products of a matrix with the four gates' weights for each row of the sequence."""
    rows = math.prod(args[0].shape[:-1])
    forward = 2 * rows * sum(weight.numel() for weight in args[1:3])
    return 2 * forward if backward else forward


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in flat_results(value) if isinstance(each, torch.Tensor)]


def workspace_bytes(name: str, bytes_read: int, bytes_made: int, device: str) -> int:
    """Return the bytes that an operator is declared to need beyond its operands and results."""
    is_cuda = device == "cuda"
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        if is_cuda:
            name = name.replace("_for_cpu", "")  # its counterpart
        else:
            return min(bytes_read + bytes_made, _MAX_ATTENTION_BYTES)
    read_halves, made_halves = (_CUDA_HALVES if is_cuda else _CPU_HALVES).get(name, (0, 0))
    declared = (read_halves * bytes_read + made_halves * bytes_made) // 2
    if is_cuda and name.startswith("convolution"):
        return min(declared, _MAX_CONVOLUTION_BYTES)
    return declared


def with_workspace(graph: StepGraph, device: str) -> StepGraph:
    """Declare the workspace of a step that is planned on one kind of device for another.

    A step captured on a CPU declares the workspace of CPU kernels, which for convolutions is
    several times that of GPU kernels. Its operators stay those that were captured.

    Example:
        >>> with_workspace(StepGraph(storages=(), storage_of_value=(), operators=()), "cuda").device
        'cpu'

    Args:
        graph: A captured step.
        device: `"cpu"` or `"cuda"`: the device that the step is to run on.

    Returns:
        The step; `graph` itself where it declares this already, as one that this function returned.
    """
    declared = graph.metadata.get(_WORKSPACE_DEVICE, graph.device)
    operators = tuple(_declare(operator, declared, device) for operator in graph.operators)
    if operators == graph.operators:
        return graph
    metadata = {**graph.metadata, _WORKSPACE_DEVICE: device}
    return dataclasses.replace(graph, operators=operators, metadata=metadata)


def _declare(operator: Operator, old: str, new: str) -> Operator:
    name = operator.target.split(".")[1] if "." in operator.target else operator.target
    declared = [
        workspace_bytes(name, operator.bytes_read, operator.bytes_written, device)
        for device in (old, new)
    ]
    num_bytes = operator.workspace_bytes - declared[0] + declared[1]  # and unplaced results
    if num_bytes == operator.workspace_bytes:
        return operator
    return dataclasses.replace(operator, workspace_bytes=max(declared[1], num_bytes))
