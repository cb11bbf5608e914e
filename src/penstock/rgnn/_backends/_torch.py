"""Laid-out programs in plain torch operators: the backend that runs everywhere.

Products with typed weights run as one matrix product per type on contiguous rows, weight gradients
likewise, so no weight is ever copied to a row. Gathers are made where they are read and dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from penstock.rgnn import _interpreter
from penstock.rgnn._graph import Graph
from penstock.rgnn._ir import Node, Program
from penstock.rgnn._plan import Plan
from penstock.rgnn._rows import RowMap, Space
from penstock.rgnn._schedule import READS, fused_outers, is_typed_product, source


def execute(
    plan: Plan,
    graph: Graph,
    values: frozenset[int],
    given: Mapping[int, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    outputs: Sequence[int],
    keep: Collection[int],
) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    """Compute some values of a plan; see `_run.Execute`."""
    tensors = itertools.chain(arguments.values(), given.values())
    dtype = next((tensor.dtype for tensor in tensors), torch.get_default_dtype())
    execution = _Execution(plan.program, graph, values, keep, dtype)
    execution.values.update(given)
    results = execution.run(arguments, outputs)
    return results, {at: execution.values[at] for at in keep}


class _Execution:
    """One pass over some values of a program; each is dropped after its last reader.

    Reads, inverse counts and per-row outers are lazy: they are made when a reader needs rows, and a
    typed product asks for their source instead.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        run: frozenset[int],
        keep: Iterable[int],
        dtype: torch.dtype,
    ) -> None:
        self._program = program
        self._graph = graph
        self._fused = fused_outers(program)
        self._run = sorted(run)
        self._keep = frozenset(keep)
        self._dtype = dtype
        self.values: dict[int, torch.Tensor] = {}

    def run(
        self, arguments: Mapping[str, torch.Tensor], outputs: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Compute the values, and of them the outputs as the user has them."""
        # Everything is in the dtype of the arguments, whatever autocast would have products be.
        with torch.autocast(self._graph.device.type, enabled=False):
            return self._run_all(arguments, outputs)

    def _run_all(
        self, arguments: Mapping[str, torch.Tensor], outputs: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        nodes = self._program.nodes
        for node, position in ((nodes[p], p) for p in self._program.inputs().values()):
            if node["name"] in arguments:
                argument = arguments[node["name"]].detach()
                self.values[position] = _interpreter.enter(self._graph, node.space, argument)
        last = self._last_reader(outputs)
        for position in self._run:
            node = nodes[position]
            if node.op == "input" or self._is_lazy(position):
                continue
            self.values[position] = self._compute(node)
            for done in last.get(position, ()):
                del self.values[done]
        found = []
        for output in outputs:
            rows = _interpreter.leave(self._graph, nodes[output].space, self._rows(output))
            # Autograd must not see an argument or a value twice as different outputs.
            is_shared = nodes[output].op in ("input", "reshape", "slice") or output in self._keep
            found.append(rows.clone() if is_shared or output in outputs[: len(found)] else rows)
        return tuple(found)

    def _compute(self, node: Node) -> torch.Tensor:
        if node.op == "sum" and node.operands[0] in self._fused:
            return self._weight_gradient(node)
        if is_typed_product(self._program, node):
            return self._typed_product(node)
        operands = [self._rows(operand) for operand in node.operands]
        if node.op == "sum":
            return _sum_rows(operands[0], self._graph, node.map)
        if node.op == "softmax":
            return _interpreter.softmax(operands[0], self._graph, node.map, _sum_rows)
        return _interpreter.apply(node, operands, self._graph).contiguous()

    def _rows(self, position: int) -> torch.Tensor:
        """The rows of a value; what is lazy is made here."""
        node = self._program.nodes[position]
        if node.op == "inverse_count":
            return _interpreter.inverse_count(self._graph, node.map, self._dtype)
        if node.op == "reshape":
            rows = self._rows(node.operands[0])
            return rows.reshape(rows.shape[0], *node.shape)
        if node.op != "gather":
            return self.values[position]
        source = self._rows(node.operands[0])
        if node.map.into is Space.ONE:  # the same for all rows: broadcasting does it
            return source.expand(self._graph.counts.rows(node.map.rows), *source.shape[1:])
        return source.index_select(0, self._graph.index(node.map))

    def _typed_product(self, node: Node) -> torch.Tensor:
        """Rows times the matrix of their type: one product per type that has rows."""
        vector = self._rows(node.operands[0])
        matrix = self._program.nodes[node.operands[1]]
        weights = self._rows(matrix.operands[0])
        if node["transposed"]:
            weights = weights.transpose(-1, -2)
        out = vector.new_empty(vector.shape[0], *node.shape)
        order, segments = _segments(self._graph, matrix.map)
        if order is not None:
            vector = vector.index_select(0, order)
        for kind, begin, end in segments:
            _product(vector[begin:end], weights[kind], out[begin:end])
        return out if order is None else torch.empty_like(out).index_copy_(0, order.long(), out)

    def _weight_gradient(self, node: Node) -> torch.Tensor:
        """For each type the sum of outer products of its rows: one product of tall matrices."""
        outer = self._program.nodes[node.operands[0]]
        left, right = (self._rows(operand) for operand in outer.operands)
        out = left.new_zeros(self._graph.counts.rows(node.space), *node.shape)
        order, segments = _segments(self._graph, node.map)
        if order is not None:
            left, right = left.index_select(0, order), right.index_select(0, order)
        for kind, begin, end in segments:
            out[kind] = _outer_sum(left[begin:end], right[begin:end], outer["heads"])
        return out

    def _is_lazy(self, position: int) -> bool:
        """Whether a value is not computed by itself but as its reader needs it."""
        op = self._program.nodes[position].op
        return op in READS or op == "inverse_count" or position in self._fused

    def _last_reader(self, outputs: Sequence[int]) -> dict[int, list[int]]:
        """For each computed value, the values that are not read after it."""
        nodes = self._program.nodes
        last: dict[int, int] = {}

        def read(position: int, reader: int) -> None:
            for operand in nodes[position].operands:
                if self._is_lazy(operand):
                    read(operand, reader)
                else:
                    last[operand] = reader

        for position in self._run:
            if not self._is_lazy(position):
                read(position, position)
        wanted = set(self._keep)
        wanted.update(source(self._program, output) for output in outputs)
        by_reader: dict[int, list[int]] = {}
        for position, reader in last.items():
            if position not in wanted and nodes[position].op != "input":
                by_reader.setdefault(reader, []).append(position)
        return by_reader


def _sum_rows(rows: torch.Tensor, graph: Graph, row_map: RowMap) -> torch.Tensor:
    """Add rows up by where `row_map` sends them, with the same bits in every run."""
    if rows.device.type == "cpu" or row_map.into is Space.ONE:
        return _interpreter.sum_rows(rows, graph, row_map)
    return sum_grouped_rows(rows, graph, row_map)


def sum_grouped_rows(rows: torch.Tensor, graph: Graph, row_map: RowMap) -> torch.Tensor:
    """The same by segments of grouped rows: elsewhere than on CPUs `index_add` adds atomically."""
    _, order = graph.grouped(row_map)
    lengths = graph.group_sizes(row_map)
    flat = rows.index_select(0, order).flatten(1) if rows.dim() > 1 else rows[order.long(), None]
    total = torch.segment_reduce(flat, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    return total.reshape(len(lengths), *rows.shape[1:])


def _segments(
    graph: Graph, row_map: RowMap
) -> tuple[torch.Tensor | None, list[tuple[int, int, int]]]:
    """An order that sorts the rows by type, and (type, begin, end) for each type that has any."""
    if row_map.into is Space.ONE:
        return None, [(0, 0, graph.counts.rows(row_map.rows))]
    starts = graph.segment_starts(row_map)
    order = graph.nodes_by_type if row_map.rows is Space.NODE else None
    ends = enumerate(itertools.pairwise(starts))
    return order, [(kind, begin, end) for kind, (begin, end) in ends if begin < end]


def _product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write `rows @ weight`: (r, *batch, k) and (k, n), or (r, heads or 1, k) and (heads, k, n)."""
    if weight.dim() == 2:
        torch.matmul(rows, weight, out=out)
    else:
        out.copy_(torch.matmul(rows.transpose(0, 1), weight).transpose(0, 1))


def _outer_sum(left: torch.Tensor, right: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum over rows of outer products: (r, *batch, k) and (r, *batch, n) to (*heads, k, n)."""
    if heads:
        return left.permute(1, 2, 0) @ right.permute(1, 0, 2)
    return left.flatten(0, -2).T @ right.flatten(0, -2)
