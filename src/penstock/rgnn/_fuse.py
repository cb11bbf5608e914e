"""Products that are only summed: rows times the matrices of their relations, added up by node.

Compaction and aggregate-first both end in this pair of kernels, the one in the backward, the other
in the forward: a segment GEMM over unique (node, relation), and a sum of its rows into the nodes.
Pairs are sorted by relation and then by node, so a range of nodes meets a range of rows in every
relation. A backend that goes over ranges of nodes, and in each over the relations, adds products
up where they are made: the rows are never in memory, and each sum has its one writer and its order.
"""

from __future__ import annotations

import dataclasses

from penstock.rgnn._ir import Program
from penstock.rgnn._rows import DST_PAIR_DST, SRC_PAIR_SRC, Counts, RowMap, Space
from penstock.rgnn._schedule import (
    Kernel,
    KernelKind,
    Schedule,
    is_typed_product,
    maps_of,
    source,
)

MIN_ROWS_OF_RELATION = 64
"""Pairs for each relation, on average, from which on it pays to go over the relations again and
again; below, the matrices weigh more than the rows."""

_SUMS = {Space.SRC_PAIR: SRC_PAIR_SRC, Space.DST_PAIR: DST_PAIR_DST}


def sum_products(program: Program, schedule: Schedule, counts: Counts) -> Schedule:
    """Join products with the sums that alone read them.

    Args:
        program: Laid out.
        schedule: Its kernels.
        counts: Rows of the graphs that it is for.

    Returns:
        A schedule in which such pairs are one kernel, which stands where the sum stood.
    """
    kernels = list(schedule.kernels)
    num_forward, joined = schedule.num_forward, set()
    for place, kernel in enumerate(schedule.kernels):
        product = _summed_product(program, kernel)
        if product is None or product in program.outputs:
            continue
        space = program.nodes[product].space
        if counts.rows(space) < MIN_ROWS_OF_RELATION * counts.num_relations:
            continue
        maker = _maker(schedule, product)
        is_of_forward = maker < schedule.num_forward
        if is_of_forward != (place < schedule.num_forward) or _is_read_elsewhere(
            program, schedule, product, kernel
        ):
            continue
        (stage,) = kernel.stages
        kernels[place] = dataclasses.replace(
            kernel, kind=KernelKind.SUMMED_GEMM, stages=((product, *stage),)
        )
        kernels[maker] = dataclasses.replace(kernels[maker], stages=())
        num_forward -= is_of_forward
        joined.add(product)
    return Schedule(
        tuple(kernel for kernel in kernels if kernel.stages),
        num_forward,
        schedule.materialised - joined,
    )


def add_rows(program: Program, schedule: Schedule) -> Schedule:
    """Join products with the row of each type that is added to them: a bias.

    Args:
        program: Laid out.
        schedule: Its kernels.

    Returns:
        A schedule in which such pairs are one kernel, which stands where the product stood.
    """
    kernels = list(schedule.kernels)
    num_forward, joined = schedule.num_forward, set()
    for place, kernel in enumerate(schedule.kernels):
        product = _product_of_sum(program, schedule, kernel)
        if product is None:
            continue
        maker = _maker(schedule, product)
        is_of_forward = place < schedule.num_forward
        if kernels[maker].kind is not KernelKind.GEMM or kernels[maker].values != (product,):
            continue
        if (maker < schedule.num_forward) != is_of_forward or _is_read_elsewhere(
            program, schedule, product, kernel
        ):
            continue
        kernels[maker] = dataclasses.replace(kernels[maker], stages=((product, kernel.values[0]),))
        kernels[place] = dataclasses.replace(kernel, stages=())
        num_forward -= is_of_forward
        joined.add(product)
    return Schedule(
        tuple(kernel for kernel in kernels if kernel.stages),
        num_forward,
        schedule.materialised - joined,
    )


def _product_of_sum(program: Program, schedule: Schedule, kernel: Kernel) -> int | None:
    """The product that a kernel adds an argument's row of the same type to, if it does no more."""
    if kernel.kind is not KernelKind.TRAVERSAL or len(kernel.values) != 1:
        return None
    total = program.nodes[kernel.values[0]]
    if total.op != "add":
        return None
    for product, row in (total.operands, total.operands[::-1]):
        node, added = program.nodes[product], program.nodes[row]
        if node.op != "matmul" or not is_typed_product(program, node):
            continue
        is_of_argument = program.nodes[source(program, row)].op == "input"
        is_of_type = added.op == "gather" and added.map == program.nodes[node.operands[1]].map
        if is_of_argument and is_of_type and added.shape == node.shape == total.shape:
            return product
    return None


def _summed_product(program: Program, kernel: Kernel) -> int | None:
    """The product whose rows a kernel sums, if that is all that its loop over rows does."""
    grouping: RowMap | None = kernel.grouped_by
    if grouping is None or _SUMS.get(kernel.space) != grouping or len(kernel.stages) != 1:
        return None
    if len(kernel.stages[0]) != 1:
        return None
    total = program.nodes[kernel.stages[0][0]]
    if total.op != "sum" or maps_of(program, total.operands[0]):
        return None
    product = source(program, total.operands[0])
    node = program.nodes[product]
    if node.op != "matmul" or node.space is not kernel.space:
        return None
    matrix = program.nodes[node.operands[1]]
    is_typed = matrix.op == "gather" and matrix.map.into is Space.RELATION
    return product if is_typed and 1 not in matrix.shape[-2:] else None


def _maker(schedule: Schedule, value: int) -> int:
    return next(n for n, kernel in enumerate(schedule.kernels) if value in kernel.values)


def _is_read_elsewhere(program: Program, schedule: Schedule, value: int, reader: Kernel) -> bool:
    (total,) = reader.stages[0]
    for position, node in enumerate(program.nodes):
        if position == total or node.op in ("gather", "reshape"):
            continue
        if any(source(program, operand) == value for operand in node.operands):
            return True
    return any(source(program, output) == value for output in program.outputs)
