"""The bytes of a cell for n nodes, measured on copies of one node.

A cell treats all nodes the same, so with `b(n)` the bytes for n nodes

    b(n) = fixed + node * n,    node = (b(n) - b(1)) / (n - 1)

The first run does not count: kernels and caches are initialised in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.batching._meter import measured_peak
from penstock.batching.dynamic._pools import has_gradient
from penstock.compat.dispatch import tree_leaves, tree_map

_MARGIN = 1.05
# A GPU's allocator rounds up to 512 bytes a tensor, which must be little beside the result.
_PROBE_NODES = {"cuda": 512}
_FEWEST_PROBE_NODES = 16


@dataclass(frozen=True)
class CellBytes:
    """Bytes of a cell for n nodes, `fixed + node * n`, and its outputs for one."""

    fixed_peak: float
    node_peak: float
    fixed_kept: float
    node_kept: float
    example: tuple[Tensor, ...]
    """The components of the outputs of one node, `[1, ...]` each."""
    is_tuple: bool

    @property
    def least_peak(self) -> float:
        """Bytes at the peak for one node."""
        return self.fixed_peak + self.node_peak


def find_mode(cell: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return all that decides, beside its arguments, the bytes of a cell."""
    tensors = [*cell.parameters(), *cell.buffers()]
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        tuple(module.training for module in cell.modules()),
        tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in tensors),
    )


def measure_cell(
    cell: nn.Module, arguments: list[Any], device: torch.device, room: float
) -> CellBytes:
    """Measure a cell on copies of one node, within `room` bytes if one node fits into them.

    `arguments` are those of one node, `[1, ...]` each.
    """
    probe = _Probe(cell, arguments)
    with _preserve_state(cell, device):
        peak, kept = probe.measure(1, device)
        most = _PROBE_NODES.get(device.type, _FEWEST_PROBE_NODES)
        count = min(most, int(room / max(peak, 1)))
        if count < 2:  # fixed bytes are then counted for each node: too much, never too little
            return CellBytes(0, peak * _MARGIN, 0, kept * _MARGIN, probe.example, probe.is_tuple)
        large_peak, large_kept = probe.measure(count, device)
        peak, kept = probe.measure(1, device)
    node_peak = max(large_peak - peak, 0) / (count - 1) * _MARGIN
    node_kept = max(large_kept - kept, 0) / (count - 1) * _MARGIN
    return CellBytes(
        max(peak * _MARGIN - node_peak, 0),
        node_peak,
        max(kept * _MARGIN - node_kept, 0),
        node_kept,
        probe.example,
        probe.is_tuple,
    )


@contextmanager
def _preserve_state(cell: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random numbers afterwards, also after an exception."""
    buffers = {name: each.clone() for name, each in cell.named_buffers()}
    numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 (a cell may use them)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])  # noqa: NPY002
        for name, each in cell.named_buffers():
            if name in buffers:
                each.data.copy_(buffers[name])


class _Probe:
    """Runs of a cell, forward and, where gradients are recorded, backward."""

    def __init__(self, cell: nn.Module, arguments: list[Any]) -> None:
        self._cell, self._arguments = cell, arguments
        self._parameters = [each for each in cell.parameters() if each.requires_grad]
        self.example: tuple[Tensor, ...] = ()
        self.is_tuple = False

    def measure(self, count: int, device: torch.device) -> tuple[int, int]:
        """Return the bytes at the peak, and those that are kept for backward."""
        torch.clear_autocast_cache()  # casts of parameters count in each of the runs
        then = self._backward if torch.is_grad_enabled() else None
        return measured_peak(lambda: self._forward(count), device, then=then)

    def _forward(self, count: int) -> tuple[Any, list[Tensor]]:
        leaves: list[Tensor] = []

        def copy_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            rows = leaf.detach().repeat(count, *[1] * (leaf.dim() - 1))
            if torch.is_grad_enabled() and has_gradient(rows):
                rows.requires_grad_()
                leaves.append(rows)
            return rows

        outputs = self._cell(*tree_map(copy_leaf, self._arguments))
        self.is_tuple = isinstance(outputs, tuple)
        components = outputs if isinstance(outputs, tuple) else (outputs,)
        if count == 1 and all(isinstance(each, Tensor) for each in components):
            self.example = tuple(each.detach().clone() for each in components)
        return outputs, leaves

    def _backward(self, result: tuple[Any, list[Tensor]]) -> None:
        outputs, leaves = result
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [*leaves, *self._parameters]
        if tensors and wanted:
            ones = [torch.ones_like(each) for each in tensors]
            torch.autograd.grad(tensors, wanted, ones, allow_unused=True)
