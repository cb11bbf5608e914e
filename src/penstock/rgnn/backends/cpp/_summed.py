"""Products that are added up where they are made, as C++; `lowering/_fuse.py` finds them.

A thread takes a range of nodes, keeps their sums in its cache, and goes over the relations: in
each, the rows of the range lie one after another, and no two of them are of one node. So a node's
sum adds relation after relation, whatever the ranges are.
"""

from __future__ import annotations

import math

from penstock.rgnn.backends.cpp._kernel import KernelTask
from penstock.rgnn.backends.cpp._products import locate
from penstock.rgnn.backends.cpp._rowwise import Lines, stretch, write_offset
from penstock.rgnn.backends.cpp._traversals import TraversalWriter
from penstock.rgnn.ir import Program

_MOST_LANES = 16
"""Numbers in the longest vector: the columns of a packed matrix are rounded up to it, at most."""


def write_summed_gemm(task: KernelTask) -> str:
    """Write a summed segment GEMM: h_v = sum over relations r of x_(v,r) W_r."""
    lines, fields = Lines(), task.fields
    product, total = task.kernel.stages[0]
    grouping = task.kernel.grouped_by
    assert grouping is not None
    ranges, num_ranges = fields.counted_array("ranges", grouping)
    rows, index = fields.array("range_rows", grouping), fields.array("index", grouping)
    size = task.size(total)
    num_types = fields.num_rows(task.node(task.node(product).operands[1]).map.into)
    with lines.block(task.head):
        if _is_packed(task.program, product):
            _write_packing(task, product, lines, num_types)
        lines.add(f"Tasks ranges({num_ranges});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            longest = fields.number("longest_range", grouping)
            lines.add(f"Scratch<T> sums({longest} * {size});")
            with lines.block("for (int64_t range; ranges.next(&range);) {"):
                lines.add(
                    f"const int64_t first = {ranges}[range], last = {ranges}[range + 1];",
                    f"memset(sums, 0, (last - first) * {size} * sizeof(T));",
                )
                with lines.block(f"for (int64_t type = 0; type < {num_types}; ++type) {{"):
                    lines.add(
                        f"const int64_t begin = {rows}[range * {num_types} + type];",
                        f"const int64_t end = {rows}[(range + 1) * {num_types} + type];",
                    )
                    into = f"sums + ({index}[row] - first) * {size}"
                    _write_products(task, product, into, lines)
                with lines.block("for (int64_t group = first; group < last; ++group) {"):
                    lines.add(f"const T* const sum_{total} = sums + (group - first) * {size};")
                    writer = TraversalWriter(task, lines)
                    writer.sums[total] = f"sum_{total}"
                    writer.write_epilogue()
    return str(lines)


def count_packed_elements(program: Program, product: int) -> int:
    """Return how many numbers the packed matrices of a type take."""
    node = program.nodes[product]
    heads = program.nodes[node.operands[1]].shape[:-2]
    return math.prod(heads) * _count_packed_matrix(program, product)


def _is_packed(program: Program, product: int) -> bool:
    """Return whether the matrices of a product are laid out anew before they are read."""
    node = program.nodes[product]
    return bool(node["transposed"]) or node.shape[-1] % _MOST_LANES != 0


def _count_packed_matrix(program: Program, product: int) -> int:
    node = program.nodes[product]
    contraction, columns = program.nodes[node.operands[0]].shape[-1], node.shape[-1]
    return contraction * (-(-columns // _MOST_LANES) * _MOST_LANES)


def _write_packing(task: KernelTask, product: int, lines: Lines, num_types: str) -> None:
    node = task.node(product)
    vector, matrix = node.operands
    shape, contraction = task.node(matrix).shape, task.node(vector).shape[-1]
    transposed = "true" if node["transposed"] else "false"
    with lines.loops(shape[:-2], simd=False, prefix="h") as heads:
        place = write_offset(shape, (*heads, "0", "0"))
        packed = f"{task.fields.packed(product)} + {_packed_offset(task.program, product, heads)}"
        lines.add(
            f"pack_all<T, {contraction}, {node.shape[-1]}, {transposed}>(f.num_threads, "
            f"{num_types}, {count_packed_elements(task.program, product)}, {packed},",
            f"    [&](int64_t type) {{ return {locate(task, matrix, 'type')} + {place}; }});",
        )


def _write_products(task: KernelTask, product: int, into: str, lines: Lines) -> None:
    """Write the products of the rows of a type, one for each vector of a row."""
    node = task.node(product)
    vector, matrix = node.operands
    vector_shape, matrix_shape = task.node(vector).shape, task.node(matrix).shape
    with lines.loops(node.shape[:-1], simd=False) as batch:
        heads = stretch(matrix_shape[:-2], batch[: len(matrix_shape) - 2])
        if _is_packed(task.program, product):
            step = count_packed_elements(task.program, product)
            weight = f"{task.fields.packed(product)} + type * {step}"
            weight += f" + {_packed_offset(task.program, product, heads)}"
        else:
            weight = f"{locate(task, matrix, 'type')}"
            weight += f" + {write_offset(matrix_shape, (*heads, '0', '0'))}"
        from_vector = write_offset(vector_shape, (*stretch(vector_shape[:-1], batch), "0"))
        lines.add(
            f"add_products<T, {vector_shape[-1]}, {node.shape[-1]}>(begin, end, {weight},",
            f"    [&](int64_t row) {{ return {locate(task, vector, 'row')} + {from_vector}; }},",
            f"    [&](int64_t row) {{ return {into} + "
            f"{write_offset(node.shape, (*batch, '0'))}; }});",
        )


def _packed_offset(program: Program, product: int, heads: tuple[str, ...]) -> str:
    shape = program.nodes[program.nodes[product].operands[1]].shape[:-2]
    return f"({write_offset(shape, heads)}) * {_count_packed_matrix(program, product)}"
