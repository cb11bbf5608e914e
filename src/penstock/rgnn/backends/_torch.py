"""Laid-out programs in plain torch operators: the backend that runs everywhere.

Products with typed weights run as one matrix product per type on contiguous rows, weight gradients
likewise, so no weight is ever copied to a row. Gathers are made where they are read and dropped.
"""

from __future__ import annotations

import itertools

import torch

from penstock.rgnn import interpreter
from penstock.rgnn.backends._invocation import (
    Backend,
    Invocation,
    Results,
    enter_arguments,
    leave_results,
    read_rows,
)
from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import LEAVES, READS, Node, Program, find_source
from penstock.rgnn.lowering import find_fused_outers, find_reads, is_typed_product, lower
from penstock.rgnn.spaces import NODE_TYPE_OF, RowMap, Space


class TorchBackend(Backend):
    """Programs in torch operators, value by value."""

    lower = staticmethod(lower)

    def __call__(self, invocation: Invocation) -> Results:
        """Compute the values of a direction."""
        # Everything is in the dtype of the arguments, whatever autocast would have products be.
        with torch.autocast(invocation.graph.device.type, enabled=False):
            return Evaluation(self._program, invocation).run()


class Evaluation:
    """One pass over the values of a direction; each is dropped after its last reader.

    Reads, inverse counts and per-row outers are lazy: they are made when a reader needs rows, and a
    typed product asks for their source instead.
    """

    def __init__(self, program: Program, invocation: Invocation) -> None:
        self._program = program
        self._invocation = invocation
        self._graph = invocation.graph
        self._dtype = invocation.dtype
        self._fused = find_fused_outers(program)
        self._positions = sorted(invocation.direction.values)
        self._values = dict(invocation.given)

    def run(self) -> Results:
        """Compute the values; return the outputs as the user has them, and what is kept."""
        nodes = self._program.nodes
        self._values |= enter_arguments(self._program, self._invocation)
        last = self._find_last_readers()
        for position in self._positions:
            if nodes[position].op == "input" or self._is_lazy(position):
                continue
            self._values[position] = self._compute(nodes[position])
            for done in last.get(position, ()):
                del self._values[done]
        return leave_results(self._program, self._invocation, self._values)

    def _compute(self, node: Node) -> torch.Tensor:
        if node.op == "sum" and node.operands[0] in self._fused:
            return self._sum_outers_by_type(node)
        if is_typed_product(self._program, node):
            return self._multiply_by_type(node)
        operands = [self._read_rows(operand) for operand in node.operands]
        if node.op == "sum":
            return _sum_rows(operands[0], self._graph, node.map)
        if node.op == "softmax":
            return interpreter.softmax(operands[0], self._graph, node.map, _sum_rows)
        return interpreter.apply(node, operands, self._graph).contiguous()

    def _read_rows(self, position: int) -> torch.Tensor:
        """Return the rows of a value; a lazy one is computed here."""
        return read_rows(self._program, self._graph, self._values, position, self._dtype)

    def _multiply_by_type(self, node: Node) -> torch.Tensor:
        """Compute y_i = x_i W_{type of i}: one product per type that has rows."""
        vector = self._read_rows(node.operands[0])
        matrix = self._program.nodes[node.operands[1]]
        weights = self._read_rows(matrix.operands[0])
        if node["transposed"]:
            weights = weights.transpose(-1, -2)
        out = vector.new_empty(vector.shape[0], *node.shape)
        order, segments = _find_segments(self._graph, matrix.map)
        if order is not None:
            vector = vector.index_select(0, order)
        for kind, begin, end in segments:
            _multiply(vector[begin:end], weights[kind], out[begin:end])
        return out if order is None else torch.empty_like(out).index_copy_(0, order.long(), out)

    def _sum_outers_by_type(self, node: Node) -> torch.Tensor:
        """Compute G_r = sum of x_i^T g_i over rows i of type r: one product per type."""
        outer = self._program.nodes[node.operands[0]]
        left, right = (self._read_rows(operand) for operand in outer.operands)
        out = left.new_zeros(self._graph.counts.rows(node.space), *node.shape)
        order, segments = _find_segments(self._graph, node.map)
        if order is not None:
            left, right = left.index_select(0, order), right.index_select(0, order)
        for kind, begin, end in segments:
            x, y = left[begin:end], right[begin:end]
            if outer["heads"]:
                out[kind] = x.permute(1, 2, 0) @ y.permute(1, 0, 2)
            else:
                out[kind] = x.flatten(0, -2).T @ y.flatten(0, -2)
        return out

    def _is_lazy(self, position: int) -> bool:
        """Return whether a value is computed where its reader needs it, not by itself."""
        op = self._program.nodes[position].op
        return op in READS or op == "inverse_count" or position in self._fused

    def _find_last_readers(self) -> dict[int, list[int]]:
        """Return, for each computed value, the values that are not read after it."""
        direction = self._invocation.direction
        nodes, reads = self._program.nodes, find_reads(self._program)
        computed = [at for at in self._positions if not self._is_lazy(at)]
        last = {read: reader for reader in computed for read in reads[reader]}
        wanted = set(direction.keep)
        wanted.update(find_source(self._program, output) for output in direction.outputs)
        by_reader: dict[int, list[int]] = {}
        for position, reader in last.items():
            if position not in wanted and nodes[position].op not in LEAVES:
                by_reader.setdefault(reader, []).append(position)
        return by_reader


def _sum_rows(rows: torch.Tensor, graph: Graph, row_map: RowMap) -> torch.Tensor:
    """Add rows up by where `row_map` sends them, with the same bits in every run."""
    if rows.device.type == "cpu" or row_map.into is Space.ONE:
        return interpreter.sum_rows(rows, graph, row_map)
    return sum_grouped_rows(rows, graph, row_map)


def sum_grouped_rows(rows: torch.Tensor, graph: Graph, row_map: RowMap) -> torch.Tensor:
    """Sum by segments of grouped rows: elsewhere than on CPUs `index_add` adds atomically."""
    _, order = graph.grouped(row_map)
    lengths = graph.group_sizes(row_map)
    flat = rows.index_select(0, order).flatten(1) if rows.dim() > 1 else rows[order.long(), None]
    total = torch.segment_reduce(flat, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    return total.reshape(len(lengths), *rows.shape[1:])


def _find_segments(
    graph: Graph, row_map: RowMap
) -> tuple[torch.Tensor | None, list[tuple[int, int, int]]]:
    """Return an order that sorts rows by type, and (type, begin, end) for each type with rows."""
    order = graph.nodes_by_type if row_map == NODE_TYPE_OF else None
    ends = enumerate(itertools.pairwise(graph.segment_starts(row_map)))
    return order, [(kind, begin, end) for kind, (begin, end) in ends if begin < end]


def _multiply(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write `rows @ weight`: (r, *batch, k) and (k, n), or (r, heads or 1, k) and (heads, k, n)."""
    if weight.dim() == 2:
        torch.matmul(rows, weight, out=out)
    else:
        out.copy_(torch.matmul(rows.transpose(0, 1), weight).transpose(0, 1))
