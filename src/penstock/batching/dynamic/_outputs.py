"""Results of a run of graphs: the outputs of all nodes, and a report."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._layout import ExecutionPlan, Operands
from penstock.batching.dynamic._pools import OutputPools, ReadOperands
from penstock.tables import Report


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


class BatchedOutputs:
    """Outputs of every node; nodes are numbered through all graphs."""

    def __init__(
        self,
        plan: ExecutionPlan,
        pools: OutputPools,
        tokens: list[Tensor],
        is_tuple: dict[int, bool],
        first_nodes: Integers,
        kinds: list[Hashable],
        types: Integers,
        report: BatchReport,
        kept: set[Hashable] | None,
    ) -> None:
        self._plan, self._pools, self._tokens, self._is_tuple = plan, pools, tokens, is_tuple
        self._kinds, self._types, self._kept = kinds, types, kept
        self.first_nodes: Integers = first_nodes
        """The first node of each graph, `[num_graphs + 1]`."""
        self.report: BatchReport = report
        """The report of the run."""

    def select(self, nodes: Sequence[int] | Integers | Tensor) -> Any:
        """Return the outputs of nodes, in the order given.

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
        if len(pools) == 1:
            return self._read_pool(pools[0], chosen)
        parts = [self._read_pool(pool, chosen[pool_of == pool]) for pool in pools]
        self._check_layouts(parts, chosen)
        order = np.argsort(np.argsort(pool_of, kind="stable"), kind="stable")
        index = torch.from_numpy(order)
        if isinstance(parts[0], tuple):
            return tuple(
                torch.cat(each).index_select(0, index.to(each[0].device))
                for each in zip(*parts, strict=True)
            )
        return torch.cat(parts).index_select(0, index.to(parts[0].device))

    def _check_kept(self, chosen: Integers) -> None:
        if self._kept is not None:
            lost = {self._kinds[t] for t in np.unique(self._types[chosen]).tolist()} - self._kept
            if lost:
                raise ValueError(
                    f"nodes have the types {sorted(lost, key=repr)}, whose outputs were not kept: "
                    f"keep was {sorted(self._kept, key=repr)}"
                )

    def _check_layouts(self, parts: Sequence[Any], chosen: Integers) -> None:
        layouts = {
            tuple((tuple(each.shape[1:]), each.dtype) for each in part)
            if isinstance(part, tuple)
            else (tuple(part.shape[1:]), part.dtype)
            for part in parts
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

    def _read_pool(self, pool: int, chosen: Integers) -> Any:
        rows = self._plan.row_of_node[chosen]
        in_order = bool((np.diff(rows) == 1).all())
        place = slice(0, len(rows)) if in_order else self._pools.extend_index(rows)
        sources = tuple(np.unique(self._plan.batch_of_node[chosen]).tolist())
        operands = Operands((0,), pool, int(rows[0]) if in_order else None, place, sources)
        tokens = [self._tokens[batch] for batch in sources]
        found = ReadOperands.apply(self._pools, operands, len(rows), *tokens)
        assert isinstance(found, tuple)
        return found if self._is_tuple[pool] else found[0]

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
