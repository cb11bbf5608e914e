"""Batches below a cap of bytes: the nodes that run at once, and whether they are recomputed.

Outputs of all nodes stay until backward, and so do their gradients there; the rest is for cells.
The bytes of a cell are measured before anything runs, once for each shape and type of its
arguments. So these hold at every moment, also of backward:

    outputs + their gradients + copies of inputs + indices = base
    base + kept by all pieces + peak of any piece <= max_bytes

A cell treats all nodes the same, so its bytes for n nodes are measured on copies of one:

    b(n) = fixed + node * n,    node = (b(n) - b(1)) / (n - 1)

The first run does not count: kernels and caches are initialised in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batching._meter import measured_peak
from penstock.batching.dynamic._layout import BatchPlan, ExecutionPlan, Operands
from penstock.batching.dynamic._outputs import OutputPools, has_gradient
from penstock.compat.dispatch import tree_leaves, tree_map
from penstock.compat.random_numbers import keep_all_random_states
from penstock.errors import CapacityError
from penstock.units import format_bytes

_INDEX_BYTES = 64  # of a node: its rows in the indices of its readers and of its operands
_CHECKPOINT_BYTES = 8192  # of a recomputed piece: the state of the random numbers
_MARGIN = 1.05
# A GPU's allocator rounds up to 512 bytes a tensor, which must be little beside the result.
_PROBE_NODES = {"cuda": 512}
_FEWEST_PROBE_NODES = 16
_INPUT_GRADIENTS = 3  # times an input: a piece's gradient, the sum so far, and the new sum


@dataclass(frozen=True)
class _CellBytes:
    """Bytes of a cell for n nodes, `fixed + node * n`, and its outputs for one."""

    fixed_peak: float
    node_peak: float
    fixed_kept: float
    node_kept: float
    example: tuple[Tensor, ...]
    """The components of the outputs of one node, `[1, ...]` each."""
    is_tuple: bool
    changes_buffers: bool
    """True if a run changes the cell's buffers, so that another one would compute otherwise."""

    @property
    def least_peak(self) -> float:
        """Bytes at the peak for one node."""
        return self.fixed_peak + self.node_peak


@dataclass(frozen=True)
class InputTensors:
    """The concatenated inputs of all graphs."""

    tensors: dict[int, tuple[Tensor, ...]]
    """By number of the signature, `[nodes, ...]` each."""
    device: torch.device
    kept_bytes: int
    """Bytes of those that are copies of the caller's tensors."""
    peak_bytes: int
    """Bytes at the peak of the concatenation."""


@dataclass(frozen=True)
class Piece:
    """The nodes `[start, stop)` of a batch, which run in one call."""

    start: int
    stop: int
    recompute: bool = False
    """True if backward recomputes it instead of keeping its saved tensors."""

    def cut(self, operands: Operands, num_nodes: int) -> list[Operands]:
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


class BatchSplitter:
    """A splitter of batches that keeps a run below a cap of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._measured: dict[Hashable, _CellBytes] = {}
        self._costs: dict[int, _CellBytes] = {}
        self._free = self._largest = 0.0

    def begin(
        self,
        plan: ExecutionPlan,
        cells: dict[int, tuple[Hashable, nn.Module]],
        pools: OutputPools,
        inputs: InputTensors,
    ) -> None:
        """Find the bytes of the cells of a run, and the bytes that are free for them.

        Raises:
            CapacityError: The cap is too small for one node.
        """
        copies = sum(len(each) for each in (plan.index, plan.row_of_node)) * 8
        base = float(inputs.kept_bytes + copies + len(plan.row_of_node) * _INDEX_BYTES)
        training = torch.is_grad_enabled()
        for tensor in (each for tensors in inputs.tensors.values() for each in tensors):
            if training and tensor.requires_grad:
                base += _INPUT_GRADIENTS * tensor.nbytes
        self._costs = {}
        examples: dict[int, tuple[tuple[Tensor, ...], bool]] = {}
        for batch in plan.batches:
            if batch.kind in self._costs:
                continue
            cost = self._measure(
                batch, cells[batch.kind][1], examples, inputs, self._max_bytes - base
            )
            self._costs[batch.kind] = cost
            if batch.pool not in examples:
                layout = pools.find_layout(batch.pool, cost.example)
                kept = tuple(
                    each.to(dtype) for each, (_, dtype) in zip(cost.example, layout, strict=True)
                )
                examples[batch.pool] = kept, cost.is_tuple
                rows = plan.pool_rows[batch.pool] * (2 if training else 1)
                base += rows * sum(each.nbytes for each in kept)
        base += _count_cast_bytes(cells, inputs.device)
        self._free = self._max_bytes - base
        self._largest = max((each.least_peak for each in self._costs.values()), default=0.0)
        if self._largest > self._free or inputs.peak_bytes > self._max_bytes:
            self._refuse(cells, max(base + self._largest, inputs.peak_bytes))

    def next_piece(self, batch: BatchPlan, done: int, kind: Hashable) -> Piece:
        """Return the next nodes of a batch that run together.

        Args:
            batch: The batch.
            done: Its nodes that have run.
            kind: Their type, for errors.

        Raises:
            CapacityError: The nodes would be recomputed, and their cell changes its buffers.
        """
        cost = self._costs[batch.kind]
        training = torch.is_grad_enabled()
        room = int((self._free - cost.fixed_peak) / max(cost.node_peak, 1.0))
        count = max(min(room, batch.num_nodes - done), 1)
        kept = cost.fixed_kept + cost.node_kept * count
        self._largest = max(self._largest, cost.fixed_peak + cost.node_peak * count)
        # At most half of the free bytes may be kept, so that later batches have room to run.
        recompute = training and kept > (self._free - self._largest) / 2
        if recompute and cost.changes_buffers:
            raise CapacityError(
                f"max_bytes={format_bytes(self._max_bytes)} has nodes of type {kind!r} recomputed "
                "in the backward pass, and their cell changes its buffers, as batch normalisation "
                "does in training: raise max_bytes, run fewer graphs at once, or set it to eval()"
            )
        if training:
            self._free -= _CHECKPOINT_BYTES if recompute else kept
        return Piece(done, done + count, recompute)

    def _measure(
        self,
        batch: BatchPlan,
        cell: nn.Module,
        examples: dict[int, tuple[tuple[Tensor, ...], bool]],
        inputs: InputTensors,
        room: float,
    ) -> _CellBytes:
        """Return the bytes of a batch's cell, measured once for each layout of its arguments."""
        operands: dict[int, Any] = {}
        for each in batch.operands:
            example, is_tuple = examples[each.pool]
            operands |= dict.fromkeys(each.slots, example if is_tuple else example[0])
        arguments = [operands[slot] for slot in range(len(operands))]
        arguments += [tensor[:1] for tensor in inputs.tensors.get(batch.kind, ())]
        layouts = tree_map(lambda each: (each.shape, each.dtype), tuple(arguments))
        key = (batch.kind, layouts, _find_mode(cell, inputs.device))
        if key not in self._measured:
            try:
                self._measured[key] = _measure_cell(cell, arguments, inputs.device, room)
            except Exception as error:
                error.add_note("raised for one node alone, whose bytes are measured for max_bytes")
                raise
        return self._measured[key]

    def _refuse(self, cells: dict[int, tuple[Hashable, nn.Module]], least_bytes: float) -> None:
        kind = max(self._costs, key=lambda kind: self._costs[kind].least_peak)
        raise CapacityError(
            f"max_bytes={format_bytes(self._max_bytes)} is too little for one node of type "
            f"{cells[kind][0]!r} beside the outputs of all nodes; at least "
            f"{format_bytes(int(least_bytes) + 1)} would do, or run fewer graphs at once"
        )


def _count_cast_bytes(cells: dict[int, tuple[Hashable, nn.Module]], device: torch.device) -> int:
    """Return the bytes of parameters that autocast casts and caches."""
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        return 0
    width = torch.get_autocast_dtype(device.type).itemsize
    modules = {id(cell): cell for _, cell in cells.values()}.values()
    parameters = {id(each): each for cell in modules for each in cell.parameters()}.values()
    return sum(each.numel() * width for each in parameters if each.dtype == torch.float32)


def _find_mode(cell: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return all that decides, beside its arguments, the bytes of a cell."""
    tensors = [*cell.parameters(), *cell.buffers()]
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        tuple(module.training for module in cell.modules()),
        tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in tensors),
    )


def _measure_cell(
    cell: nn.Module, arguments: list[Any], device: torch.device, room: float
) -> _CellBytes:
    """Measure a cell on copies of one node, within `room` bytes if one node fits into them.

    `arguments` are those of one node, `[1, ...]` each.
    """
    probe = _Probe(cell, arguments)
    with _preserve_state(cell, device) as has_changed:
        peak, kept = probe.measure(1, device)
        most = _PROBE_NODES.get(device.type, _FEWEST_PROBE_NODES)
        count = min(most, int(room / max(peak, 1)))
        found = probe.example, probe.is_tuple, has_changed()
        if count < 2:  # fixed bytes are then counted for each node: too much, never too little
            return _CellBytes(0, peak * _MARGIN, 0, kept * _MARGIN, *found)
        large_peak, large_kept = probe.measure(count, device)
        peak, kept = probe.measure(1, device)
    node_peak = max(large_peak - peak, 0) / (count - 1) * _MARGIN
    node_kept = max(large_kept - kept, 0) / (count - 1) * _MARGIN
    return _CellBytes(
        max(peak * _MARGIN - node_peak, 0),
        node_peak,
        max(kept * _MARGIN - node_kept, 0),
        node_kept,
        *found,
    )


@contextmanager
def _preserve_state(cell: nn.Module, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore buffers and random numbers afterwards, also after an exception.

    Yields a function that returns whether buffers have changed.
    """
    buffers = {name: each.clone() for name, each in cell.named_buffers()}

    def has_changed() -> bool:
        now = ((name, each) for name, each in cell.named_buffers() if name in buffers)
        return not all(torch.equal(each, buffers[name]) for name, each in now)

    try:
        with keep_all_random_states(device):
            yield has_changed
    finally:
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
