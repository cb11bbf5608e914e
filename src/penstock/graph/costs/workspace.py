"""Declared workspace: memory that kernels take beside their operands and results.

The factors for CPUs are bounds of the allocations that were seen in kernels of common sizes, which
reorder operands into blocks; `measure` finds a graph's own. On GPUs torch chooses another algorithm
for a convolution where memory is short.
"""

from __future__ import annotations

import dataclasses

from penstock.graph.step_graph import Operator, StepGraph

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
        The step; `graph` itself where it declares this already.
    """
    operators = tuple(_declare(operator, graph.device, device) for operator in graph.operators)
    if operators == graph.operators:
        return graph
    return dataclasses.replace(graph, operators=operators)


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
