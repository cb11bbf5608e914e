"""Matrix products as C++: segment GEMMs and weight gradients, on rows that are gathered as read."""

from __future__ import annotations

import math

from penstock.rgnn._backends._cpp_fields import Fields
from penstock.rgnn._backends._cpp_rowwise import Lines, Scope, offset, stretched
from penstock.rgnn._backends._cpp_traversal import is_sorted
from penstock.rgnn._ir import Program
from penstock.rgnn._rows import RowMap, Space
from penstock.rgnn._schedule import Kernel


def write_gemm(program: Program, kernel: Kernel, head: str, fields: Fields) -> str:
    """The source of a segment GEMM; `head` is its function's name and parameters."""
    lines = Lines()
    product, value = kernel.values[0], kernel.values[-1]
    node = program.nodes[product]
    vector, matrix = node.operands
    vector_shape, matrix_shape = (program.nodes[operand].shape for operand in node.operands)
    row_map = program.nodes[matrix].map
    contraction, columns = vector_shape[-1], node.shape[-1]
    tiles, num_tiles = fields.tiles(row_map)
    arguments = f"f.num_threads, {tiles}, {num_tiles}, {_order(fields, row_map)}"
    is_transposed = "true" if node["transposed"] else "false"
    with lines.block(f"void {head} {{"):
        with lines.loops(node.shape[:-1], simd=False) as batch:
            from_vector = offset(vector_shape, (*stretched(vector_shape[:-1], batch), "0"))
            heads = batch[: len(matrix_shape) - 2]
            from_matrix = offset(matrix_shape, (*stretched(matrix_shape[:-2], heads), "0", "0"))
            into = offset(node.shape, (*batch, "0"))
            begins = "false"
            begin = "nullptr"
            if value != product:
                begins, (row,) = "true", set(program.nodes[value].operands) - {product}
                begin = f"{read_location(program, fields, row, 'type')} + {into}"
            lines.add(
                f"segment_product<T, {contraction}, {columns}, {is_transposed}, {begins}>(",
                f"    {arguments},",
                f"    [&](int64_t row) {{ return {read_location(program, fields, vector, 'row')} + "
                f"{from_vector}; }},",
                f"    [&](int64_t row) {{ return {fields.value(value)} + row * "
                f"{math.prod(node.shape)} + {into}; }},",
                f"    [&](int64_t type) {{ return "
                f"{read_location(program, fields, matrix, 'type')} + "
                f"{from_matrix}; }},",
                f"    [&](int64_t type) -> const T* {{ (void)type; return {begin}; }});",
            )
    return str(lines)


def write_weight_gradient(program: Program, kernel: Kernel, head: str, fields: Fields) -> str:
    """The source of a sum of outer products; `head` is its function's name and parameters."""
    lines = Lines()
    (value,) = kernel.values
    node = program.nodes[value]
    outer = program.nodes[node.operands[0]]
    shapes = [program.nodes[operand].shape for operand in outer.operands]
    num_heads = outer["heads"]
    *heads, rows, columns = node.shape
    rest = _batch(shapes)[num_heads:]
    assert len(rest) <= 1, shapes
    tasks, num_tasks = fields.tasks(node.map)
    starts = fields.task_starts(node.map)
    order, size = _order(fields, node.map), math.prod(node.shape)
    with lines.block(f"void {head} {{"):
        with lines.loops(tuple(heads), simd=False) as at:
            ends = []
            for operand, shape in zip(outer.operands, shapes, strict=True):
                batch = stretched(shape[:-1], (*at, *("pair" for _ in rest)))
                place = offset(shape, (*batch, "0"))
                ends.append(
                    f"    [&](int64_t row, int64_t pair) {{ (void)pair; return "
                    f"{read_location(program, fields, operand, 'row')} + {place}; }},"
                )
            into = offset(node.shape, (*at, "0", "0"))
            lines.add(
                f"weight_gradient<T, {rows}, {columns}, {math.prod(rest)}>("
                f"f.num_threads, {tasks}, {num_tasks}, {order},",
                *ends,
                f"    [&](int64_t task) {{ return part_of<T>(task, {tasks}, {starts}, {size}, "
                f"{fields.parts(value)}, {fields.value(value)}) + {into}; }});",
            )
        lines.add(
            f"add_parts<T>(f.num_threads, {starts}, "
            f"{fields.num_rows(node.map.into)}, {size}, {fields.parts(value)}, "
            f"{fields.value(value)});"
        )
    return str(lines)


def _batch(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The axes before the last, broadcast from the left."""
    longest = max(len(shape) - 1 for shape in shapes)
    padded = [shape[:-1] + (1,) * (longest + 1 - len(shape)) for shape in shapes]
    return tuple(max(pair) for pair in zip(*padded, strict=True))


def _order(fields: Fields, row_map: RowMap) -> str:
    """The rows sorted by type; null where they are."""
    if is_sorted(row_map):
        return "static_cast<const Index*>(nullptr)"
    return fields.rows(row_map)


def read_location(program: Program, fields: Fields, position: int, row: str) -> str:
    """A pointer to the row of an operand, at a row of the kernel's space or of the type's."""

    def index(row_map: RowMap | None) -> str:
        if row_map is None:
            return row
        if row_map.into is Space.ONE:
            return "0"
        # The type of a row is known where a matrix is read.
        return row if row == "type" else f"{fields.index(row_map)}[{row}]"

    lines = Lines()
    scope = Scope(program, fields, lines, index, frozenset(), frozenset(), {})
    return scope.location(position)
