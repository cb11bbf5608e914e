"""Matrix products as C++: segment GEMMs and weight gradients, on rows that are gathered as read."""

from __future__ import annotations

import math

from penstock.rgnn.backends.cpp._fields import Fields
from penstock.rgnn.backends.cpp._kernel import KernelTask
from penstock.rgnn.backends.cpp._rowwise import Lines, Scope, stretch, write_offset
from penstock.rgnn.ir import broadcast
from penstock.rgnn.spaces import RowMap, Space, is_sorted


def write_gemm(task: KernelTask) -> str:
    """Write a segment GEMM: y_i = x_i W_{type of i}, plus the row of its type if it has a bias."""
    lines, fields = Lines(), task.fields
    product, value = task.kernel.values[0], task.kernel.values[-1]
    node = task.node(product)
    vector, matrix = node.operands
    vector_shape, matrix_shape = (task.node(operand).shape for operand in node.operands)
    row_map = task.node(matrix).map
    contraction, columns = vector_shape[-1], node.shape[-1]
    tiles, num_tiles = fields.counted_array("tiles", row_map)
    arguments = f"f.num_threads, {tiles}, {num_tiles}, {_read_order(fields, row_map)}"
    is_transposed = "true" if node["transposed"] else "false"
    with lines.block(task.head):
        with lines.loops(node.shape[:-1], simd=False) as batch:
            from_vector = write_offset(vector_shape, (*stretch(vector_shape[:-1], batch), "0"))
            heads = batch[: len(matrix_shape) - 2]
            from_matrix = write_offset(matrix_shape, (*stretch(matrix_shape[:-2], heads), "0", "0"))
            into = write_offset(node.shape, (*batch, "0"))
            has_bias, bias = "false", "nullptr"
            if value != product:
                has_bias, (row,) = "true", set(task.node(value).operands) - {product}
                bias = f"{locate(task, row, 'type')} + {into}"
            lines.add(
                f"segment_product<T, {contraction}, {columns}, {is_transposed}, {has_bias}>(",
                f"    {arguments},",
                f"    [&](int64_t row) {{ return {locate(task, vector, 'row')} + "
                f"{from_vector}; }},",
                f"    [&](int64_t row) {{ return {fields.value(value)} + row * "
                f"{task.size(product)} + {into}; }},",
                f"    [&](int64_t type) {{ return {locate(task, matrix, 'type')} + "
                f"{from_matrix}; }},",
                f"    [&](int64_t type) -> const T* {{ (void)type; return {bias}; }});",
            )
    return str(lines)


def write_weight_gradient(task: KernelTask) -> str:
    """Write a sum of outer products: G_r = sum of x_i^T y_i over the rows i of type r."""
    lines, fields = Lines(), task.fields
    (value,) = task.kernel.values
    node = task.node(value)
    outer = task.node(node.operands[0])
    shapes = [task.node(operand).shape for operand in outer.operands]
    num_heads = outer["heads"]
    *heads, rows, columns = node.shape
    rest = broadcast(shapes[0][:-1], shapes[1][:-1])[num_heads:]
    assert len(rest) <= 1, shapes
    tasks, num_tasks = fields.counted_array("tasks", node.map)
    starts = fields.array("task_starts", node.map)
    order, size = _read_order(fields, node.map), math.prod(node.shape)
    with lines.block(task.head):
        with lines.loops(tuple(heads), simd=False) as at:
            ends = []
            for operand, shape in zip(outer.operands, shapes, strict=True):
                batch = stretch(shape[:-1], (*at, *("pair" for _ in rest)))
                place = write_offset(shape, (*batch, "0"))
                ends.append(
                    f"    [&](int64_t row, int64_t pair) {{ (void)pair; return "
                    f"{locate(task, operand, 'row')} + {place}; }},"
                )
            into = write_offset(node.shape, (*at, "0", "0"))
            lines.add(
                f"weight_gradient<T, {rows}, {columns}, {math.prod(rest)}>("
                f"f.num_threads, {tasks}, {num_tasks}, {order},",
                *ends,
                f"    [&](int64_t task) {{ return part_of<T>(task, {tasks}, {starts}, {size}, "
                f"{fields.parts(value)}, {fields.value(value)}) + {into}; }});",
            )
        lines.add(
            f"add_parts<T>(f.num_threads, {starts}, {fields.num_rows(node.map.into)}, {size}, "
            f"{fields.parts(value)}, {fields.value(value)});"
        )
    return str(lines)


def locate(task: KernelTask, position: int, row: str) -> str:
    """Return a pointer to the row of an operand, at a row of the kernel's space or of the type's.

    Args:
        task: The kernel.
        position: The operand.
        row: "row", or "type" where the type of a row is known.
    """

    def index(row_map: RowMap | None) -> str:
        if row_map is None:
            return row
        if row_map.into is Space.ONE:
            return "0"
        return row if row == "type" else f"{task.fields.array('index', row_map)}[{row}]"

    scope = Scope(task, Lines(), index, frozenset(), frozenset(), {})
    return scope.write_location(position)


def _read_order(fields: Fields, row_map: RowMap) -> str:
    """Return the rows sorted by type; null where they are."""
    if is_sorted(row_map):
        return "static_cast<const Index*>(nullptr)"
    return fields.array("rows", row_map)
