"""The C++ source of a program: a function for each kernel, and one that runs a direction's.

Matrix products are here, on rows that are gathered as they are read; `_traversals.py` has the rest.
Products that are only summed are added up where they are made (`lowering/_program.py` finds them).
A thread takes a range of nodes, keeps their sums in its cache, and goes over the relations: in
each, the rows of the range lie one after another, and no two of them are of one node. So a node's
sum adds relation after relation, whatever the ranges are.
"""

from __future__ import annotations

import math
from pathlib import Path

from penstock.rgnn.backends.cpp._kernel import Field, KernelTask, Lines, stretch, write_offset
from penstock.rgnn.backends.cpp._traversals import TraversalWriter, write_traversal
from penstock.rgnn.ir import Program, broadcast, describe_read
from penstock.rgnn.lowering import Kernel, KernelKind, LoweredProgram
from penstock.rgnn.spaces import RowMap, is_sorted

_MOST_LANES = 16
"""Numbers in the longest vector: the columns of a packed matrix are rounded up to it, at most."""


def write_gemm(task: KernelTask) -> str:
    """Write a segment GEMM: y_i = x_i W_{type of i}, plus the row of its type if it has a bias."""
    lines = Lines()
    product, value = task.kernel.values[0], task.kernel.values[-1]
    node = task.node(product)
    vector, matrix = node.operands
    vector_shape, matrix_shape = (task.node(operand).shape for operand in node.operands)
    row_map = task.node(matrix).map
    contraction, columns = vector_shape[-1], node.shape[-1]
    tiles, num_tiles = task.counted_array("tiles", row_map)
    arguments = f"f.num_threads, {tiles}, {num_tiles}, {_read_order(task, row_map)}"
    with lines.block(task.head), lines.loops(node.shape[:-1], simd=False) as batch:
        from_vector = write_offset(vector_shape, (*stretch(vector_shape[:-1], batch), "0"))
        heads = batch[: len(matrix_shape) - 2]
        from_matrix = write_offset(matrix_shape, (*stretch(matrix_shape[:-2], heads), "0", "0"))
        into = write_offset(node.shape, (*batch, "0"))
        has_bias, bias = "false", "nullptr"
        if value != product:
            has_bias, (row,) = "true", set(task.node(value).operands) - {product}
            bias = f"{task.locate(row, of_type=True)} + {into}"
        lines.add(
            f"segment_product<T, {contraction}, {columns}, {_is_transposed(task, product)}, "
            f"{has_bias}>(",
            f"    {arguments},",
            f"    [&](int64_t row) {{ return {task.locate(vector)} + {from_vector}; }},",
            f"    [&](int64_t row) {{ return {task.address(value, 'row')} + {into}; }},",
            f"    [&](int64_t type) {{ return {task.locate(matrix, of_type=True)} + "
            f"{from_matrix}; }},",
            f"    [&](int64_t type) -> const T* {{ (void)type; return {bias}; }});",
        )
    return str(lines)


def write_weight_gradient(task: KernelTask) -> str:
    """Write a sum of outer products: G_r = sum of x_i^T y_i over the rows i of type r."""
    lines = Lines()
    (value,) = task.kernel.values
    node = task.node(value)
    outer = task.node(node.operands[0])
    shapes = [task.node(operand).shape for operand in outer.operands]
    *heads, rows, columns = node.shape
    rest = broadcast(shapes[0][:-1], shapes[1][:-1])[outer["heads"] :]
    assert len(rest) <= 1, shapes
    tasks, num_tasks = task.counted_array("tasks", node.map)
    starts = task.field("task_starts", node.map)
    order, size = _read_order(task, node.map), task.size(value)
    with lines.block(task.head):
        with lines.loops(tuple(heads), simd=False) as at:
            ends = []
            for operand, shape in zip(outer.operands, shapes, strict=True):
                batch = stretch(shape[:-1], (*at, *("pair" for _ in rest)))
                place = write_offset(shape, (*batch, "0"))
                ends.append(
                    f"    [&](int64_t row, int64_t pair) {{ (void)pair; return "
                    f"{task.locate(operand)} + {place}; }},"
                )
            into = write_offset(node.shape, (*at, "0", "0"))
            sums = f"{size}, {task.field('parts', value)}, {task.field('value', value)}"
            lines.add(
                f"weight_gradient<T, {rows}, {columns}, {math.prod(rest)}>("
                f"f.num_threads, {tasks}, {num_tasks}, {order},",
                *ends,
                f"    [&](int64_t task) {{ return part_of<T>(task, {tasks}, {starts}, {sums}) + "
                f"{into}; }});",
            )
        num_types = task.field("num_rows", node.map.into)
        lines.add(f"add_parts<T>(f.num_threads, {starts}, {num_types}, {sums});")
    return str(lines)


def write_summed_gemm(task: KernelTask) -> str:
    """Write a summed segment GEMM: h_v = sum over relations r of x_(v,r) W_r."""
    lines = Lines()
    product, total = task.kernel.stages[0]
    grouping = task.kernel.grouped_by
    assert grouping is not None
    ranges, num_ranges = task.counted_array("ranges", grouping)
    rows, index = task.field("range_rows", grouping), task.field("index", grouping)
    size = task.size(total)
    num_types = task.field("num_rows", task.node(task.node(product).operands[1]).map.into)
    with lines.block(task.head):
        if _is_packed(task.program, product):
            _write_packing(task, product, lines, num_types)
        lines.add(f"Tasks ranges({num_ranges});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            longest = task.field("longest_range", grouping)
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
                    TraversalWriter(task, lines, {total: f"sum_{total}"}).write_epilogue()
    return str(lines)


def count_packed_elements(program: Program, product: int) -> int:
    """Return how many numbers the packed matrices of a type take."""
    heads = program.nodes[program.nodes[product].operands[1]].shape[:-2]
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
    with lines.loops(shape[:-2], simd=False, prefix="h") as heads:
        place = write_offset(shape, (*heads, "0", "0"))
        packed = f"{task.field('packed', product)} + {_packed_offset(task.program, product, heads)}"
        lines.add(
            f"pack_all<T, {contraction}, {node.shape[-1]}, {_is_transposed(task, product)}>("
            f"f.num_threads, {num_types}, {count_packed_elements(task.program, product)}, "
            f"{packed},",
            f"    [&](int64_t type) {{ return {task.locate(matrix, of_type=True)} + {place}; }});",
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
            weight = f"{task.field('packed', product)} + type * {step}"
            weight += f" + {_packed_offset(task.program, product, heads)}"
        else:
            weight = task.locate(matrix, of_type=True)
            weight += f" + {write_offset(matrix_shape, (*heads, '0', '0'))}"
        from_vector = write_offset(vector_shape, (*stretch(vector_shape[:-1], batch), "0"))
        lines.add(
            f"add_products<T, {vector_shape[-1]}, {node.shape[-1]}>(begin, end, {weight},",
            f"    [&](int64_t row) {{ return {task.locate(vector)} + {from_vector}; }},",
            f"    [&](int64_t row) {{ return {into} + "
            f"{write_offset(node.shape, (*batch, '0'))}; }});",
        )


def _packed_offset(program: Program, product: int, heads: tuple[str, ...]) -> str:
    shape = program.nodes[program.nodes[product].operands[1]].shape[:-2]
    return f"({write_offset(shape, heads)}) * {_count_packed_matrix(program, product)}"


def _is_transposed(task: KernelTask, product: int) -> str:
    return "true" if task.node(product)["transposed"] else "false"


def _read_order(task: KernelTask, row_map: RowMap) -> str:
    """Return the rows sorted by type; null where they are."""
    if is_sorted(row_map):
        return "static_cast<const Index*>(nullptr)"
    return task.field("rows", row_map)


_WRITERS = {
    KernelKind.GEMM: write_gemm,
    KernelKind.WEIGHT_GRADIENT: write_weight_gradient,
    KernelKind.SUMMED_GEMM: write_summed_gemm,
    KernelKind.TRAVERSAL: write_traversal,
}


def write_source(
    lowered: LoweredProgram, *, scalar: str, index: str, has_hubs: bool = False
) -> tuple[str, dict[str, tuple[Field, ...]]]:
    """Generate the source of a program; return it with its functions and the arguments of each.

    Counts of rows are no part of it, so programs for graphs of other sizes share it if they compute
    the same.
    """
    program, schedule = lowered.optimized.program, lowered.schedule
    descriptions = [describe_kernel(program, k, n) for n, k in enumerate(schedule.kernels)]
    parts, fields_of = [], {}
    for name, direction in lowered.directions().items():
        fields: dict[Field, None] = {Field("num_threads", ()): None}
        functions, calls = [], ""
        frame = f"{name.capitalize()}Frame"
        for number, kernel in enumerate(direction.kernels, direction.first_kernel):
            head = f"void kernel_{number}(const {frame}& f) {{"
            task = KernelTask(program, schedule.materialised, kernel, head, fields, has_hubs)
            functions.append("\n".join([*descriptions[number], _WRITERS[kernel.kind](task)]))
            calls += f"  kernel_{number}(*frame);\n"
        members = "".join(f"  {field.declaration}\n" for field in fields)
        fields_of[name] = tuple(fields)
        parts += [
            "namespace {",
            f"struct {frame} {{\n{members}}};",
            *functions,
            "}  // namespace",
            f'extern "C" void penstock_{name}(const {frame}* frame) {{\n{calls}}}',
        ]
    header = [
        "// A relational program, generated by penstock.rgnn. Its kernels, in order:",
        *(line for lines in descriptions for line in lines),
        f"// Of these the first {schedule.num_forward} are the forward.",
    ]
    types = f"namespace {{\nusing T = {scalar};\nusing Index = {index};\n}}  // namespace"
    support = Path(__file__).with_name("support.hpp").read_text(encoding="utf-8")
    text = "\n\n".join(["\n".join(header), support, types, *parts]) + "\n"
    return text, fields_of


def describe_kernel(program: Program, kernel: Kernel, number: int) -> list[str]:
    """Return a kernel as comments. Names of the user's are not among them."""
    head = f"// {number}. {kernel.kind.value} over {kernel.space.value} rows"
    if kernel.grouped_by is not None:
        head += f", grouped by {kernel.grouped_by.name}"
    lines = [head]
    for value in kernel.values:
        node = program.nodes[value]
        operands = (describe_read(program, operand, has_names=False) for operand in node.operands)
        shape = " x ".join(map(str, node.shape)) or "scalar"
        lines.append(f"//      %{value} = {node.op}({', '.join(operands)}), {shape}")
    return lines
