"""Products that are added up where they are made, as C++; `_fuse.py` says which those are.

A thread takes a range of nodes, whose sums stay in its cache, and goes over the relations: in each,
the rows of the range lie one after another, and no two of them are of one node. So a node's sum
adds relation after relation, whatever the ranges are.
"""

from __future__ import annotations

import math

from penstock.rgnn._backends._cpp_fields import Fields
from penstock.rgnn._backends._cpp_products import read_location
from penstock.rgnn._backends._cpp_rowwise import Lines, offset, stretched
from penstock.rgnn._backends._cpp_traversal import Traversal
from penstock.rgnn._ir import Program
from penstock.rgnn._schedule import Kernel, Schedule

_MOST_LANES = 16
"""Numbers in the longest vector: what a packed matrix's columns are rounded up to, at most."""


def write_summed_gemm(
    program: Program, schedule: Schedule, kernel: Kernel, head: str, fields: Fields
) -> str:
    """The source of a summed segment GEMM; `head` is its function's name and parameters."""
    lines = Lines()
    product, total = kernel.stages[0]
    assert kernel.grouped_by is not None
    ranges, num_ranges = fields.ranges(kernel.grouped_by)
    rows = fields.range_rows(kernel.grouped_by)
    index = fields.index(kernel.grouped_by)
    size = math.prod(program.nodes[total].shape)
    num_types = fields.num_rows(program.nodes[program.nodes[product].operands[1]].map.into)
    with lines.block(f"void {head} {{"):
        if is_packed(program, product):
            _write_packing(program, product, lines, fields, num_types)
        lines.add(f"Tasks ranges({num_ranges});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            longest = fields.longest_range(kernel.grouped_by)
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
                    _write_products(program, product, into, lines, fields)
                with lines.block("for (int64_t group = first; group < last; ++group) {"):
                    lines.add(f"const T* const sum_{total} = sums + (group - first) * {size};")
                    writer = Traversal(program, schedule, kernel, fields, lines)
                    writer.sums[total] = f"sum_{total}"
                    writer.write_epilogue()
    return str(lines)


def is_packed(program: Program, product: int) -> bool:
    """Whether the matrices of a product are laid out anew before they are read."""
    node = program.nodes[product]
    return bool(node["transposed"]) or node.shape[-1] % _MOST_LANES != 0


def packed_elements(program: Program, product: int) -> int:
    """How many numbers the packed matrices of a type take."""
    node = program.nodes[product]
    heads = program.nodes[node.operands[1]].shape[:-2]
    return math.prod(heads) * _packed_matrix(program, product)


def _packed_matrix(program: Program, product: int) -> int:
    node = program.nodes[product]
    contraction, columns = program.nodes[node.operands[0]].shape[-1], node.shape[-1]
    return contraction * (-(-columns // _MOST_LANES) * _MOST_LANES)


def _write_packing(
    program: Program, product: int, lines: Lines, fields: Fields, num_types: str
) -> None:
    node = program.nodes[product]
    vector, matrix = node.operands
    shape = program.nodes[matrix].shape
    contraction = program.nodes[vector].shape[-1]
    transposed = "true" if node["transposed"] else "false"
    with lines.loops(shape[:-2], simd=False, prefix="h") as heads:
        place = offset(shape, (*heads, "0", "0"))
        packed = f"{fields.packed(product)} + {_packed_head(program, product, heads)}"
        lines.add(
            f"pack_all<T, {contraction}, {node.shape[-1]}, {transposed}>(f.num_threads, "
            f"{num_types}, {packed_elements(program, product)}, {packed},",
            f"    [&](int64_t type) {{ return {read_location(program, fields, matrix, 'type')} + "
            f"{place}; }});",
        )


def _write_products(
    program: Program, product: int, into: str, lines: Lines, fields: Fields
) -> None:
    """For the rows of a type, for each vector of a row."""
    node = program.nodes[product]
    vector, matrix = node.operands
    vector_shape, matrix_shape = program.nodes[vector].shape, program.nodes[matrix].shape
    with lines.loops(node.shape[:-1], simd=False) as batch:
        heads = stretched(matrix_shape[:-2], batch[: len(matrix_shape) - 2])
        if is_packed(program, product):
            step = packed_elements(program, product)
            weight = f"{fields.packed(product)} + type * {step}"
            weight += f" + {_packed_head(program, product, heads)}"
        else:
            weight = f"{read_location(program, fields, matrix, 'type')}"
            weight += f" + {offset(matrix_shape, (*heads, '0', '0'))}"
        from_vector = offset(vector_shape, (*stretched(vector_shape[:-1], batch), "0"))
        lines.add(
            f"add_products<T, {vector_shape[-1]}, {node.shape[-1]}>(begin, end, {weight},",
            f"    [&](int64_t row) {{ return {read_location(program, fields, vector, 'row')} + "
            f"{from_vector}; }},",
            f"    [&](int64_t row) {{ return {into} + {offset(node.shape, (*batch, '0'))}; }});",
        )


def _packed_head(program: Program, product: int, heads: tuple[str, ...]) -> str:
    shape = program.nodes[program.nodes[product].operands[1]].shape[:-2]
    return f"({offset(shape, heads)}) * {_packed_matrix(program, product)}"
