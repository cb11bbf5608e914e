"""A budget of bytes for running a graph: how much of a batch may run at once, and what is kept.

Outputs of all nodes stay until backward, and so do their gradients there; what is left of the
budget is for cells. What a cell takes is measured once, on one node and on a few.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from penstock.batching._execution_plan import BatchPlan, ExecutionPlan, Operands
from penstock.batching._meter import measured_peak
from penstock.errors import CapacityError
from penstock.units import format_bytes

_PROBE_NODES = (1, 16)
_MARGIN = 1.05
_INDEX_BYTES = 64  # of a node: the rows that it reads and is read by


@dataclass(frozen=True)
class Piece:
    """The nodes `[start, stop)` of a batch, which run in one call."""

    start: int
    stop: int
    recompute: bool = False
    """Whether backward runs it again instead of keeping what it needs."""

    def of(self, operands: Operands, num_nodes: int) -> list[Operands]:
        """Return the part of a batch's operands that these nodes read."""
        if self.stop - self.start == num_nodes:
            return [operands]
        if operands.start is not None:
            return [operands._replace(rows=slice(self.start, self.stop))]
        parts = []
        for place, slot in enumerate(operands.slots):
            first = operands.rows.start + place * num_nodes
            rows = slice(first + self.start, first + self.stop)
            parts.append(operands._replace(slots=(slot,), rows=rows))
        return parts


@dataclass(frozen=True)
class _CellBytes:
    """What a cell takes for n nodes: `fixed + per_node * n`."""

    fixed_peak: float
    node_peak: float
    fixed_kept: float
    node_kept: float
    node_output: float


class Budget:
    """Splits batches so that what they take stays below a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cells: dict[tuple[int, bool], _CellBytes] = {}
        self._plan: ExecutionPlan | None = None
        self._kept = self._outputs = self._largest = 0.0

    def begin(self, plan: ExecutionPlan) -> None:
        """Start a run."""
        self._plan = plan
        self._kept, self._outputs, self._largest = 0.0, 0.0, 0.0
        self._seen_pools: set[int] = set()

    def next_piece(
        self, batch: BatchPlan, done: int, named: tuple[Hashable, nn.Module], first: list[Any]
    ) -> Piece:
        """Return the next nodes of a batch that can run together."""
        assert self._plan is not None
        kind, cell = named
        training = torch.is_grad_enabled()
        if (batch.kind, training) not in self._cells:
            self._cells[batch.kind, training] = _probe(cell, first, training)
        cost = self._cells[batch.kind, training]
        if batch.pool not in self._seen_pools:
            self._seen_pools.add(batch.pool)
            rows = self._plan.pool_rows[batch.pool]
            self._outputs += cost.node_output * rows * (2 if training else 1)
        num_nodes = len(self._plan.row_of_node)
        free = self._max_bytes - self._outputs - self._kept - num_nodes * _INDEX_BYTES
        left = batch.num_nodes - done
        room = int((free - cost.fixed_peak) / max(cost.node_peak, 1.0))
        if room < 1:
            least = self._max_bytes - free + cost.fixed_peak + cost.node_peak
            raise CapacityError(
                f"max_bytes={format_bytes(self._max_bytes)} is too little for one node of type "
                f"{kind!r} beside the outputs of all nodes; at least "
                f"{format_bytes(int(least) + 1)} would do, or run fewer graphs at once"
            )
        count = min(room, left)
        kept = cost.fixed_kept + cost.node_kept * count
        self._largest = max(self._largest, cost.fixed_peak + cost.node_peak * count)
        # Only half of what is free may be kept, so that later batches have room to run.
        recompute = training and kept > (free - self._largest) / 2
        if training and not recompute:
            self._kept += kept
        return Piece(done, done + count, recompute)


def _probe(cell: nn.Module, first: list[Any], training: bool) -> _CellBytes:
    """Measure a cell on copies of one node, in a run without effect on anything."""
    buffers = {name: each.clone() for name, each in cell.named_buffers()}
    device = next((leaf.device for leaf in tree_leaves(first) if isinstance(leaf, Tensor)), None)
    gpus = [device] if device is not None and device.type == "cuda" else []
    parameters = [each for each in cell.parameters() if each.requires_grad]
    measured = []
    node_output = 0
    with torch.random.fork_rng(devices=gpus), torch.set_grad_enabled(training):
        for count in _PROBE_NODES:
            probe = _Probe(cell, first, count, parameters)
            kept = measured_peak(probe.forward, device or "cpu")[1]
            peak = measured_peak(probe.step if training else probe.forward, device or "cpu")[0]
            measured.append((peak, kept))
            node_output = probe.output_bytes // count
    for name, each in cell.named_buffers():
        each.data.copy_(buffers[name])
    (small_peak, small_kept), (large_peak, large_kept) = measured
    nodes = _PROBE_NODES[1] - _PROBE_NODES[0]
    node_peak = max(large_peak - small_peak, 0) / nodes * _MARGIN
    node_kept = max(large_kept - small_kept, 0) / nodes * _MARGIN
    return _CellBytes(
        max(small_peak * _MARGIN - node_peak, 0),
        node_peak,
        max(small_kept * _MARGIN - node_kept, 0),
        node_kept,
        node_output,
    )


class _Probe:
    """A cell with operands of `count` nodes, all alike."""

    def __init__(
        self, cell: nn.Module, first: list[Any], count: int, parameters: list[nn.Parameter]
    ) -> None:
        self._cell, self._first, self._count = cell, first, count
        self._parameters = parameters
        self.output_bytes = 0

    def forward(self) -> Any:
        leaves: list[Tensor] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            rows = leaf.detach().repeat(self._count, *[1] * (leaf.dim() - 1))
            if torch.is_grad_enabled() and rows.is_floating_point():
                rows.requires_grad_()
                leaves.append(rows)
            return rows

        arguments = tree_map(copied, self._first)
        outputs = self._cell(*arguments)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.output_bytes = sum(each.nbytes for each in tensors)
        return outputs, leaves

    def step(self) -> None:
        outputs, leaves = self.forward()
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [*leaves, *self._parameters]
        if tensors and wanted:
            ones = [torch.ones_like(each) for each in tensors]
            torch.autograd.grad(tensors, wanted, ones, allow_unused=True)
