"""Outputs of a run: all batches in one tensor, their gradients in another, and the results.

Batches write their outputs into pools, outside of autograd, and read operands from there. A token
connects them for autograd: an empty tensor that is the result of a batch and an argument of all
its readers. In backward, readers add into the gradient pool; autograd runs the writer's node after
all of them, and the writer reads its rows from there. So a step moves each gradient once: no reader
makes a gradient as large as the whole pool.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._layout import ExecutionPlan, Operands
from penstock.compat import autograd
from penstock.compat.dispatch import is_batched
from penstock.compat.dynamo import run_uncompiled
from penstock.tables import Report

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BatchReport(Report, title="dynamic batches"):
    """Counts, bytes and times of one run of graphs."""

    num_graphs: int
    num_nodes: int
    num_batches: int
    """Calls of cells."""
    lower_bound: int
    """A number of calls below which there is no schedule."""
    num_pieces: int
    """Calls after `max_bytes` has split batches."""
    num_recomputed: int
    """Pieces that keep nothing for backward and are recomputed there."""
    gathered_bytes: int
    """Bytes of operands that were gathered."""
    sliced_bytes: int
    """Bytes of operands that were contiguous slices."""
    output_bytes: int
    """Bytes of the outputs of all nodes."""
    scheduling_seconds: float
    """Time from graphs to the plan of their execution."""
    was_planned: bool
    """True if graphs of these shapes had been run together before."""
    planned_by: str
    """"C++", or "NumPy" where there is no compiler."""


@dataclass(eq=False, repr=False)
class BatchedOutputs:
    """Outputs of every node; nodes are numbered through all graphs."""

    _plan: ExecutionPlan
    _pools: OutputPools
    _tokens: list[Tensor]
    _is_tuple: dict[int, bool]
    first_nodes: Integers
    """The first node of each graph, `[num_graphs + 1]`."""
    _kinds: list[Hashable]
    _types: Integers
    report: BatchReport
    """The report of the run."""
    _kept: set[Hashable] | None

    @run_uncompiled(reason="what is read depends on the graphs")
    def select(self, nodes: Sequence[int] | Integers | Tensor) -> Any:
        """Return copies of the outputs of nodes, in the order given.

        Hooks and gradients of a copy are of what is computed from it, not of nodes that have read
        the same outputs.

        Args:
            nodes: Numbers of nodes through all graphs, at least one (see `first_nodes`), or a mask
                with a truth value for each node.

        Returns:
            The output of their cells, with one row per node: `[num_nodes, ...]`.

        Raises:
            ValueError: There is no such node, or their cells return different shapes or types.
            TypeError: `nodes` are neither whole numbers nor truth values.
        """
        chosen = self._read_numbers(nodes)
        if chosen.ndim != 1 or len(chosen) == 0:
            raise ValueError(f"nodes must be one or more numbers; got shape {chosen.shape}")
        if chosen.min() < 0 or chosen.max() >= self.first_nodes[-1]:
            raise ValueError(f"nodes must be between 0 and {self.first_nodes[-1] - 1}")
        self._check_kept(chosen)
        pool_of = self._plan.pool_of_node[chosen]
        pools = np.unique(pool_of).tolist()
        parts = [self._read_pool(pool, chosen[pool_of == pool]) for pool in pools]
        components = parts[0]
        if len(pools) > 1:
            self._check_layouts(pools, parts, chosen)
            order = np.argsort(np.argsort(pool_of, kind="stable"), kind="stable")
            index = torch.from_numpy(order)
            components = tuple(
                torch.cat(each).index_select(0, index.to(each[0].device))
                for each in zip(*parts, strict=True)
            )
        return components if self._is_tuple[pools[0]] else components[0]

    def _check_kept(self, chosen: Integers) -> None:
        if self._kept is not None:
            lost = {self._kinds[t] for t in np.unique(self._types[chosen]).tolist()} - self._kept
            if lost:
                raise ValueError(
                    f"nodes have the types {sorted(lost, key=repr)}, whose outputs were not kept: "
                    f"keep was {sorted(self._kept, key=repr)}"
                )

    def _check_layouts(
        self, pools: list[int], parts: list[tuple[Tensor, ...]], chosen: Integers
    ) -> None:
        layouts = {
            (self._is_tuple[pool], *((each.shape[1:], each.dtype) for each in part))
            for pool, part in zip(pools, parts, strict=True)
        }
        if len(layouts) > 1:
            raise ValueError(
                "nodes must be of types with cells that return the same shapes; select those of "
                f"{sorted({repr(self._kinds[t]) for t in self._types[chosen].tolist()})} apart"
            )

    def _read_numbers(self, nodes: Any) -> Integers:
        """Return nodes, given by numbers or by a mask, as an array of numbers."""
        chosen = np.asarray(nodes.detach().cpu() if isinstance(nodes, Tensor) else nodes)
        if chosen.dtype.kind == "b":
            num_nodes = int(self.first_nodes[-1])
            if chosen.shape != (num_nodes,):
                raise ValueError(
                    f"a mask of nodes must have one truth value for each of the {num_nodes} nodes; "
                    f"got shape {chosen.shape}"
                )
            return np.flatnonzero(chosen)
        if chosen.dtype.kind not in "iu" and chosen.size:
            raise TypeError(
                f"nodes must be whole numbers or a mask; got numbers of type {chosen.dtype}"
            )
        return chosen.astype(np.int64)

    def _read_pool(self, pool: int, chosen: Integers) -> tuple[Tensor, ...]:
        rows = self._plan.row_of_node[chosen]
        in_order = bool((np.diff(rows) == 1).all())
        place = slice(0, len(rows)) if in_order else self._pools.extend_index(rows)
        sources = tuple(np.unique(self._plan.batch_of_node[chosen]).tolist())
        operands = Operands((0,), pool, int(rows[0]) if in_order else None, place, sources)
        tokens = [self._tokens[batch] for batch in sources]
        found = ReadOperands.apply(self._pools, operands, len(rows), *tokens)
        assert isinstance(found, tuple)
        # The caller may change them in place; the rows of the pool are read again.
        return tuple(each.clone() for each in found) if in_order else found

    def of(self, kind: Hashable) -> Any:
        """Return the outputs of all nodes of a type, graph by graph.

        Args:
            kind: The type.

        Returns:
            The output of its cell, `[num_nodes, ...]`.
        """
        codes = [code for code, each in enumerate(self._kinds) if each == kind]
        nodes = np.flatnonzero(np.isin(self._types, codes))
        if len(nodes) == 0:
            raise ValueError(f"no node has the type {kind!r}")
        return self.select(nodes)

    def last(self) -> Any:
        """Return the outputs of the last node of each graph: `[num_graphs, ...]`."""
        if (np.diff(self.first_nodes) == 0).any():
            raise ValueError("a graph without nodes has no last one")
        return self.select(self.first_nodes[1:] - 1)


class OutputPools:
    """The outputs of a graph's nodes by pool and component.

    Pools in `widened` keep half precision as float32, since other cells that write to them may
    return float32 under autocast.
    """

    def __init__(self, pool_rows: list[int], index: Tensor, widened: Collection[int] = ()) -> None:
        self._num_rows = pool_rows
        self._widened = widened
        self._values: list[tuple[Tensor, ...] | None] = [None] * len(pool_rows)
        self.gradients = GradientPools(index, len(pool_rows))
        self.gathered_bytes = 0
        self.sliced_bytes = 0

    def write(self, pool: int, start: int, components: tuple[Tensor, ...], name: Any) -> None:
        """Store the outputs of a batch, `[num_nodes, ...]` each, at `start`."""
        values, layout = self._values[pool], self.find_layout(pool, components)
        if values is None:
            # Tensors of inference mode would not notice that they are changed in place.
            with autograd.outside_inference_mode():
                values = self._values[pool] = tuple(
                    each.new_empty((self._num_rows[pool], *each.shape[1:]), dtype=dtype)
                    for each, (_, dtype) in zip(components, layout, strict=True)
                )
            self.gradients.describe(pool, values)
        expected = self.find_layout(pool, values)
        if layout != expected:
            raise ValueError(
                f"the cell of {name!r} returns {layout}, but cells with outputs for the same "
                f"argument returned {expected} (shape without the batch axis, and dtype); they "
                "must return the same"
            )
        for value, component in zip(values, components, strict=True):
            # .data has a version counter of its own: the rows written here are in no slice that
            # autograd has saved, although they share a storage.
            value.data[start : start + len(component)].copy_(component.detach())

    def find_layout(
        self, pool: int, components: tuple[Tensor, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape, without the batch axis, and dtype of rows as a pool keeps them."""
        widens = pool in self._widened
        return [
            (tuple(each.shape[1:]), torch.float32 if widens and each.dtype in _HALF else each.dtype)
            for each in components
        ]

    def read(self, operands: Operands, num_nodes: int) -> list[tuple[Tensor, ...]]:
        """Return for each slot the components of its operand, `[num_nodes, ...]` each."""
        values = self._values[operands.pool]
        assert values is not None
        if operands.start is not None:
            first = operands.start + operands.rows.start
            last = operands.start + operands.rows.stop
            slices = tuple(value.data[first:last] for value in values)
            self.sliced_bytes += sum(each.nbytes for each in slices)
            return [slices]
        index = self.gradients.index[operands.rows]
        gathered = [value.index_select(0, index) for value in values]
        self.gathered_bytes += sum(each.nbytes for each in gathered)
        if len(operands.slots) == 1:  # no views, which the caller could not change in place
            return [tuple(gathered)]
        parts = [each.split(num_nodes) for each in gathered]
        return list(zip(*parts, strict=True))

    def extend_index(self, rows: Integers) -> slice:
        """Add rows to read later; return their range in the index."""
        index = self.gradients.index
        more = torch.from_numpy(rows).to(index.device)
        self.gradients.index = torch.cat([index, more])
        return slice(len(index), len(index) + len(rows))

    def nbytes(self) -> int:
        """Return the bytes of all outputs."""
        return sum(value.nbytes for values in self._values if values for value in values)


class GradientPools:
    """The gradients of a graph's outputs, for the time of a backward pass.

    Autograd's nodes have these and not the outputs, which so live as long as they are read, and
    not as long as a loss does.
    """

    def __init__(self, index: Tensor, num_pools: int) -> None:
        self.index = index
        self._layouts: list[list[tuple[torch.Size, torch.dtype, torch.device]]] = [
            [] for _ in range(num_pools)
        ]
        self._gradients: dict[int, tuple[Tensor, ...]] = {}
        self._pass = -1

    def describe(self, pool: int, values: tuple[Tensor, ...]) -> None:
        """Take the layouts of a pool's outputs."""
        self._layouts[pool] = [(each.shape, each.dtype, each.device) for each in values]

    def add(self, operands: Operands, num_nodes: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Add the gradients of operands, slot by slot and component by component."""
        pool = self._find_pool(operands.pool)
        for place in range(len(operands.slots)):
            for component, target in enumerate(pool):
                gradient = gradients[place * len(pool) + component]
                if gradient is None:
                    continue
                if operands.start is not None:
                    first = operands.start + operands.rows.start
                    target[first : operands.start + operands.rows.stop] += gradient
                else:
                    first = operands.rows.start + place * num_nodes
                    if _share_memory(gradient, target):  # as that of a sum's term, its result's
                        gradient = gradient.clone()
                    target.index_add_(0, self.index[first : first + num_nodes], gradient)

    def take(self, pool: int, start: int, num_nodes: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows of a batch."""
        return tuple(
            each[start : start + num_nodes] if has_gradient(each) else None
            for each in self._find_pool(pool)
        )

    def _find_pool(self, pool: int) -> tuple[Tensor, ...]:
        current = autograd.current_graph_task_id()
        if current != self._pass:  # another backward pass, as with retain_graph=True
            self._pass, self._gradients = current, {}
            autograd.call_after_backward(self._gradients.clear)
        if pool not in self._gradients:
            self._gradients[pool] = tuple(
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype, device in self._layouts[pool]
            )
        return self._gradients[pool]


class WriteOutputs(torch.autograd.Function):
    """Components of a batch's outputs -> their token."""

    @staticmethod
    def forward(
        ctx: Any, pools: OutputPools, pool: int, start: int, name: Any, *components: Tensor
    ) -> Tensor:
        pools.write(pool, start, components, name)
        ctx.place = (pools.gradients, pool, start, len(components[0]))
        ctx.dtypes = [each.dtype for each in components]
        return components[0].new_empty(0, dtype=torch.get_default_dtype())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pools, pool, start, num_nodes = ctx.place
        gradients = pools.take(pool, start, num_nodes)
        cast = (
            None if each is None else each.to(dtype)
            for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, None, None, None, *cast


class ReadOperands(torch.autograd.Function):
    """Tokens of the batches that are read -> operands, slot by slot and component by component."""

    @staticmethod
    def forward(
        ctx: Any, pools: OutputPools, operands: Operands, num_nodes: int, *tokens: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.place = (pools.gradients, operands, num_nodes)
        ctx.num_tokens = len(tokens)
        outputs = tuple(each for slot in pools.read(operands, num_nodes) for each in slot)
        ctx.mark_non_differentiable(*(each for each in outputs if not has_gradient(each)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # pools are outside of autograd: the result would be wrong
            raise RuntimeError(
                "outputs of a DynamicBatcher can be differentiated once; create_graph=True is not "
                "supported: run the cells one by one where second derivatives are needed"
            )
        given = [each for each in gradients if each is not None]
        if autograd.is_transformed() or any(map(is_batched, given)):
            raise RuntimeError(
                "outputs of a DynamicBatcher take one gradient at a time: call "
                "torch.autograd.grad for each, without is_grads_batched and torch.func.vmap"
            )
        pools, operands, num_nodes = ctx.place
        pools.add(operands, num_nodes, gradients)
        return (None, None, None, *[None] * ctx.num_tokens)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def has_gradient(tensor: Tensor) -> bool:
    """Return whether autograd differentiates with respect to tensors of this type."""
    return tensor.is_floating_point() or tensor.is_complex()
