"""Verification of a program whose Python numbers have changed: is it still the captured one?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from penstock.compat.autocast import outside_autocast
from penstock.graph.batches import is_full_mask, replace_tensors
from penstock.graph.capturing.capture import verify
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.encoding import dtype_from_name
from penstock.graph.step_graph import StepGraph


def verify_again(graph: StepGraph, program: StepProgram) -> None:
    """Call a program once more on fake tensors, and compare its operators with its graph.

    Args:
        graph: The graph, captured in this process.
        program: The program with a batch of the captured form.

    Raises:
        CaptureError: The program does something else now.
    """
    batch = replace_tensors(program.batch, "batch", functools.partial(_copy_layout, graph))
    assert graph.captured is not None
    program = program._replace(batch=batch, accumulate=graph.captured.accumulate)
    with torch.inference_mode(False), enable_autocast(graph):
        verify(graph.captured, program, graph.device)


@contextlib.contextmanager
def enable_autocast(graph: StepGraph) -> Iterator[None]:
    """Have autocast in the block as it was during the capture."""
    name = graph.metadata.get("autocast")
    with outside_autocast(graph.device):
        if name is None:
            yield
        else:
            with torch.autocast(graph.device, dtype_from_name(name)):
                yield


def _copy_layout(graph: StepGraph, tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return a tensor with the captured strides, and no full mask if the graph is for any mask."""
    view = graph.tensors[path]
    if path not in graph.metadata.get("full_masks", ()) and is_full_mask(tensor):
        tensor = tensor.clone()
        tensor[0, -1] = 0
    if tensor.stride() == view.stride:
        return tensor
    made = torch.empty_strided(view.shape, view.stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
