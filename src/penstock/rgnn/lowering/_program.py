"""Lowered programs, the two ways to lower one, and the fusion that one of them does.

Products that are only summed are rows times the matrices of their relations, added up by node.
Compaction and aggregate-first both end in this pair of kernels, the one in the backward, the other
in the forward: a segment GEMM over unique (node, relation), and a sum of its rows into the nodes.
Pairs are sorted by relation and then by node, so a range of nodes meets a range of rows in every
relation. A backend that goes over ranges of nodes, and in each over the relations, adds products
up where they are made: the rows are never in memory, and each sum has its one writer and its order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from penstock.rgnn.ir import READS, Program, find_maps, find_source
from penstock.rgnn.lowering._order import ScratchNumbers, order_kernels
from penstock.rgnn.lowering._schedule import (
    Kernel,
    KernelKind,
    KernelSchedule,
    assign_kernels,
    find_reads,
    is_typed_product,
)
from penstock.rgnn.passes import OptimizedProgram
from penstock.rgnn.spaces import DST_PAIR_DST, SRC_PAIR_SRC, Counts, Space

MIN_ROWS_OF_RELATION = 64
"""Pairs for each relation, on average, from which on it pays to go over the relations again and
again; below, the matrices weigh more than the rows."""

_FindProduct = Callable[[Kernel], int | None]
_Fuse = Callable[[Kernel, Kernel, int], tuple[Kernel, Kernel]]
"""From the kernels that make and read a product: what takes their places."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """The forward or the backward of a program: its values, its kernels, and what leaves it."""

    values: frozenset[int]
    """Positions of the values to compute."""
    kernels: tuple[Kernel, ...]
    first_kernel: int
    """The number of its first kernel in the schedule."""
    outputs: tuple[int, ...]
    """Positions of the results: the program's outputs, or its gradients."""
    keep: tuple[int, ...]
    """Positions of the values, besides outputs, that the backward is given."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredProgram:
    """A program as kernels: all that a backend is told before it gets a graph."""

    optimized: OptimizedProgram
    schedule: KernelSchedule
    """The kernels of the forward, then those of the backward."""
    forward: Direction
    backward: Direction
    scratch: tuple[ScratchNumbers, ...] = ()
    """Scratch memory of each direction, if the order of kernels was chosen for it."""

    def directions(self) -> dict[str, Direction]:
        """Return the directions by name."""
        return {"forward": self.forward, "backward": self.backward}


def lower(optimized: OptimizedProgram) -> LoweredProgram:
    """Assign values to kernels, which run in the order of the program."""
    schedule = assign_kernels(optimized.program, optimized.forward)
    return _lowered(optimized, schedule)


def lower_for_arena(optimized: OptimizedProgram) -> LoweredProgram:
    """Lower for a backend that sums products where it makes them and owns its memory.

    Products are fused with their sums and biases, and kernels run in an order that needs less
    scratch memory.
    """
    program, counts = optimized.program, optimized.counts
    schedule = assign_kernels(program, optimized.forward)
    schedule = fuse_biases(program, fuse_sums(program, schedule, counts))
    outputs = {find_source(program, output) for output in program.outputs}
    schedule, scratch = order_kernels(program, schedule, optimized.kept | outputs, counts)
    return _lowered(optimized, schedule, scratch)


def _lowered(
    optimized: OptimizedProgram, schedule: KernelSchedule, scratch: tuple[ScratchNumbers, ...] = ()
) -> LoweredProgram:
    program, split = optimized.program, schedule.num_forward
    outputs = program.outputs[: optimized.num_outputs]
    gradients = program.outputs[optimized.num_outputs :]
    keep = tuple(sorted(optimized.kept.difference(program.inputs().values())))
    kernels = schedule.kernels
    return LoweredProgram(
        optimized,
        schedule,
        Direction(optimized.forward, kernels[:split], 0, outputs, keep),
        Direction(optimized.backward, kernels[split:], split, gradients, ()),
        scratch,
    )


def fuse_sums(program: Program, schedule: KernelSchedule, counts: Counts) -> KernelSchedule:
    """Fuse each product with the sum that alone reads it; the kernel stands where the sum stood."""

    def find(kernel: Kernel) -> int | None:
        product = _find_summed_product(program, kernel)
        if product is None or product in program.outputs:
            return None
        num_rows = counts.rows(program.nodes[product].space)
        return None if num_rows < MIN_ROWS_OF_RELATION * counts.num_relations else product

    def fuse(maker: Kernel, reader: Kernel, product: int) -> tuple[Kernel, Kernel]:
        (stage,) = reader.stages
        summed = dataclasses.replace(
            reader, kind=KernelKind.SUMMED_GEMM, stages=((product, *stage),)
        )
        return dataclasses.replace(maker, stages=()), summed

    return _fuse_products(program, schedule, find, fuse)


def fuse_biases(program: Program, schedule: KernelSchedule) -> KernelSchedule:
    """Fuse each product with the row of its type, a bias, that is added to it.

    The kernel stands where the product stood.
    """

    def fuse(maker: Kernel, reader: Kernel, product: int) -> tuple[Kernel, Kernel]:
        assert maker.kind is KernelKind.GEMM, maker
        assert maker.values == (product,), maker
        biased = dataclasses.replace(maker, stages=((product, reader.values[0]),))
        return biased, dataclasses.replace(reader, stages=())

    return _fuse_products(program, schedule, lambda k: _find_biased_product(program, k), fuse)


def _fuse_products(
    program: Program, schedule: KernelSchedule, find: _FindProduct, fuse: _Fuse
) -> KernelSchedule:
    """Fuse kernels with the one that makes their product, if nothing else reads it."""
    kernels, split, fused = list(schedule.kernels), schedule.num_forward, set()
    for place, kernel in enumerate(schedule.kernels):
        product = find(kernel)
        if product is None:
            continue
        maker = next(n for n, k in enumerate(schedule.kernels) if product in k.values)
        is_of_one_direction = (maker < split) == (place < split)
        if not is_of_one_direction or _is_read_elsewhere(program, product, kernel):
            continue
        kernels[maker], kernels[place] = fuse(kernels[maker], kernel, product)
        fused.add(product)
    return KernelSchedule(
        tuple(kernel for kernel in kernels if kernel.stages),
        sum(bool(kernel.stages) for kernel in kernels[:split]),
        schedule.materialised - fused,
    )


def _find_biased_product(program: Program, kernel: Kernel) -> int | None:
    """Return the product that a kernel only adds an argument's row of the same type to."""
    if kernel.kind is not KernelKind.TRAVERSAL or len(kernel.values) != 1:
        return None
    total = program.nodes[kernel.values[0]]
    if total.op != "add":
        return None
    for product, row in (total.operands, total.operands[::-1]):
        node, added = program.nodes[product], program.nodes[row]
        if not is_typed_product(program, node):
            continue
        is_of_argument = program.nodes[find_source(program, row)].op == "input"
        is_of_type = added.op == "gather" and added.map == program.nodes[node.operands[1]].map
        if is_of_argument and is_of_type and added.shape == node.shape == total.shape:
            return product
    return None


def _find_summed_product(program: Program, kernel: Kernel) -> int | None:
    """Return the product of which a kernel sums the rows, if its loop does nothing else."""
    if kernel.grouped_by not in (SRC_PAIR_SRC, DST_PAIR_DST):
        return None
    if [len(stage) for stage in kernel.stages] != [1]:
        return None
    total = program.nodes[kernel.stages[0][0]]
    if total.op != "sum" or find_maps(program, total.operands[0]):
        return None
    product = find_source(program, total.operands[0])
    node = program.nodes[product]
    if node.space is not kernel.space or not is_typed_product(program, node):
        return None
    return product if program.nodes[node.operands[1]].map.into is Space.RELATION else None


def _is_read_elsewhere(program: Program, value: int, reader: Kernel) -> bool:
    (total,) = reader.stages[0]
    readers = {at for at, read in enumerate(find_reads(program)) if value in read} - {total}
    is_output = any(find_source(program, output) == value for output in program.outputs)
    return is_output or any(program.nodes[at].op not in READS for at in readers)
