"""Aggregate first: sum what a typed linear operator reads, not what it makes.

`sum over e of c_e * (x_e @ W[r])` is `sum over r of (sum over e in r of c_e * x_e) @ W[r]`. The
product then has a row for each unique (destination, relation) instead of one for each edge or each
unique (source, relation). It is exact where only linear operators lie between the product and the
sum; `c_e` may be any scalar of the edge (and the head).
"""

from __future__ import annotations

import dataclasses

from penstock.rgnn import spaces
from penstock.rgnn.ir import Program, find_coordinates
from penstock.rgnn.passes._compact import count_fewest_rows
from penstock.rgnn.passes._decision import PassResult, Rewriter
from penstock.rgnn.spaces import Counts, RowMap, Space

# For a sum over edges, its two steps: by (node, relation), then by node.
_STEPS = {
    spaces.EDGE_DST: (spaces.EDGE_DST_PAIR, spaces.DST_PAIR_DST),
    spaces.EDGE_SRC: (spaces.EDGE_SRC_PAIR, spaces.SRC_PAIR_SRC),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaled:
    """A product times edge scalars and plain numbers, as found below a sum."""

    product: int
    scales: tuple[int, ...]
    factor: float
    chain: tuple[int, ...]
    """The nodes from the one below the sum down to the product."""


def aggregate_first(program: Program, counts: Counts, *, can_compact: bool = True) -> PassResult:
    """Move typed products behind the sums to nodes, where that leaves fewer rows to multiply.

    `can_compact` is whether the product would otherwise be computed on as few rows as it can.
    """
    depends = find_coordinates(program)

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        node = program.nodes[position]
        if node.op != "sum" or node.map not in _STEPS:
            return None
        found = _find_product(program, node.operands[0])
        if found is None or rewriter.find_typed_map(program.nodes[found.product].operands[1]) != (
            spaces.EDGE_TYPE
        ):
            return None
        rows = counts.num_edges
        if can_compact:
            rows = count_fewest_rows(Space.EDGE, depends[found.product], counts)
        pair_map = _STEPS[node.map][0]
        if not _should_apply(rewriter, position, found, rows, counts.rows(pair_map.into)):
            return None
        return _sum_in_two_steps(rewriter, found, node.map)

    return Rewriter(program, "aggregate first").run(rewrite)


def _find_product(program: Program, position: int) -> _Scaled | None:
    """Find the product below a sum, through multiplications by scalars."""
    nodes = program.nodes
    scales: list[int] = []
    chain: list[int] = []
    factor = 1.0
    while True:
        chain.append(position)
        node = nodes[position]
        if node.op == "matmul":
            return _Scaled(position, tuple(scales), factor, tuple(chain))
        if node.op == "scale":
            factor *= node["value"]
            position = node.operands[0]
        elif node.op == "mul":
            left, right = node.operands
            # The vector is the operand with the features; the scalar has fewer axes.
            if len(nodes[left].shape) > len(nodes[right].shape):
                left, right = right, left
            scales.append(left)
            position = right
        else:
            return None


def _should_apply(
    rewriter: Rewriter, position: int, found: _Scaled, rows: int, num_pairs: int
) -> bool:
    nodes = rewriter.program.nodes
    product = nodes[found.product]
    what = "sum(c * (x @ W)) to sum(sum(c * x) @ W)"
    users = (position, *found.chain)
    for value, user in zip(found.chain, users, strict=False):
        if not rewriter.is_only_used_by(value, user):
            return rewriter.decide(position, False, what, "x @ W is needed elsewhere as well")
    if any(len(nodes[scale].shape) >= len(product.shape) for scale in found.scales):
        return rewriter.decide(position, False, what, "c differs from feature to feature")
    vector, matrix = (nodes[operand] for operand in product.operands)
    batch = vector.shape[:-1]
    widened = max([1, *(nodes[scale].shape[0] for scale in found.scales if nodes[scale].shape)])
    num_heads = max([1, *matrix.shape[:-2], *batch])
    work = num_pairs * max([1, widened, *batch, *matrix.shape[:-2]])
    reason = f"{num_pairs:,} rows to multiply instead of {rows:,}"
    return rewriter.decide(position, work < rows * num_heads, what, reason)


def _sum_in_two_steps(rewriter: Rewriter, found: _Scaled, end: RowMap) -> int:
    builder = rewriter.builder
    pair_map, last_map = _STEPS[end]
    product = rewriter.program.nodes[found.product]
    vector, matrix = (rewriter.place[operand] for operand in product.operands)
    later = []  # scalars that are the same for all edges of a pair are applied to the pair
    for scale in found.scales:
        of_pair = builder.read(rewriter.place[scale], pair_map)
        if of_pair is not None:
            later.append(of_pair)
        else:
            vector = builder.add("mul", rewriter.place[scale], vector)
    total = builder.add("sum", vector, map=pair_map)
    for scale in later:
        total = builder.add("mul", scale, total)
    weight = builder.read(matrix, pair_map)
    assert weight is not None
    total = builder.add("matmul", total, weight, transposed=product["transposed"])
    if found.factor != 1.0:
        total = builder.add("scale", total, value=found.factor)
    return builder.add("sum", total, map=last_map)
