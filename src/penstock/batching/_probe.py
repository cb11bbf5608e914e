"""What a cell takes for n nodes, measured on copies of one node.

The bytes are `fixed + per_node * n`: a cell treats every node alike. Two numbers of nodes tell the
two apart. The first run does not count: kernels and caches set themselves up in it.
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
from torch.utils._pytree import tree_leaves, tree_map

from penstock.batching._meter import measured_peak
from penstock.batching._pools import has_gradient

_MARGIN = 1.05
# A GPU's allocator rounds up to 512 bytes a tensor, which must be little beside what is measured.
_PROBE_NODES = {"cuda": 512}
_FEWEST_PROBE_NODES = 16


@dataclass(frozen=True)
class CellBytes:
    """What a cell takes for n nodes: `fixed + node * n`, and what it returns for one."""

    fixed_peak: float
    node_peak: float
    fixed_kept: float
    node_kept: float
    example: tuple[Tensor, ...]
    """The components of the outputs of one node, `[1, ...]` each."""
    is_tuple: bool

    @property
    def least_peak(self) -> float:
        """What it takes for one node."""
        return self.fixed_peak + self.node_peak


def mode_of(cell: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return all that decides, beside its arguments, what a cell takes."""
    tensors = [*cell.parameters(), *cell.buffers()]
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        tuple(module.training for module in cell.modules()),
        tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in tensors),
    )


def probe(cell: nn.Module, arguments: list[Any], device: torch.device, room: float) -> CellBytes:
    """Measure a cell on copies of one node.

    Args:
        cell: The module.
        arguments: Of one node, `[1, ...]` each.
        device: Where the cell runs.
        room: Bytes that the probe should stay within, if one node does.

    Returns:
        Its bytes.
    """
    probed = _Probe(cell, arguments)
    with _without_effect(cell, device):
        peak, kept = probed.measure(1, device)
        most = _PROBE_NODES.get(device.type, _FEWEST_PROBE_NODES)
        count = min(most, int(room / max(peak, 1)))
        if count < 2:  # fixed bytes are then counted for each node: too much, never too little
            return CellBytes(0, peak * _MARGIN, 0, kept * _MARGIN, probed.example, probed.is_tuple)
        large_peak, large_kept = probed.measure(count, device)
        peak, kept = probed.measure(1, device)
    node_peak = max(large_peak - peak, 0) / (count - 1) * _MARGIN
    node_kept = max(large_kept - kept, 0) / (count - 1) * _MARGIN
    return CellBytes(
        max(peak * _MARGIN - node_peak, 0),
        node_peak,
        max(kept * _MARGIN - node_kept, 0),
        node_kept,
        probed.example,
        probed.is_tuple,
    )


@contextmanager
def _without_effect(cell: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and random numbers back, whatever happens."""
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

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            rows = leaf.detach().repeat(count, *[1] * (leaf.dim() - 1))
            if torch.is_grad_enabled() and has_gradient(rows):
                rows.requires_grad_()
                leaves.append(rows)
            return rows

        outputs = self._cell(*tree_map(copied, self._arguments))
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
