"""Linear operators in a better order (Hector, ASPLOS'24, linear operator reordering).

- `dot(x @ W[r], a[r])` is `dot(x, W[r] a[r])`.
- `(x @ V[t]) @ W[r]` is `x @ (V[t] W[r])`, where the relation decides the node type.
- `concat(a, b) @ W` is `a @ W_a + b @ W_b`, and the same for `dot`.

All are exact because all operators between are linear. Weights are multiplied with weights first
where the intermediate serves nothing else and there are fewer types than rows. A concatenation,
which depends on all that its parts depend on, is not made where its parts differ in that; each
product is computed on the rows that its own part needs.

Aggregate first: a sum is taken of what a typed linear operator reads, not of what it makes.
`sum over e of c_e * (x_e @ W[r])` is `sum over r of (sum over e in r of c_e * x_e) @ W[r]`. The
product then has a row for each unique (destination, relation) instead of one for each edge or each
unique (source, relation). It is exact where only linear operators lie between the product and the
sum; `c_e` may be any scalar of the edge (and the head).
"""

from __future__ import annotations

import dataclasses

from penstock.rgnn import spaces
from penstock.rgnn.ir import Program, Shape, find_coordinates
from penstock.rgnn.passes._compact import CountRows, make_row_counter
from penstock.rgnn.passes._decision import PassResult, Rewriter
from penstock.rgnn.spaces import Counts, RowMap, Space

_TYPE_AT_END = {
    spaces.EDGE_SRC: spaces.RELATION_SRC_TYPE,
    spaces.EDGE_DST: spaces.RELATION_DST_TYPE,
}
# For a sum over edges, its two steps: by (node, relation), then by node.
_STEPS = {
    spaces.EDGE_DST: (spaces.EDGE_DST_PAIR, spaces.DST_PAIR_DST),
    spaces.EDGE_SRC: (spaces.EDGE_SRC_PAIR, spaces.SRC_PAIR_SRC),
}


def reorder(program: Program, counts: Counts, can_compact: bool) -> PassResult:
    """Multiply weights with weights first, where that is legal and saves work.

    `can_compact` is whether products would otherwise be computed on as few rows as they can.
    """
    count_rows = make_row_counter(program, counts, can_compact)

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        op = program.nodes[position].op
        if op == "dot":
            return _rewrite_dot(rewriter, position, counts, count_rows)
        if op == "matmul":
            return _rewrite_product(rewriter, position, counts, count_rows)
        return None

    return Rewriter(program, "reorder").run(rewrite)


def _rewrite_dot(
    rewriter: Rewriter, position: int, counts: Counts, count_rows: CountRows
) -> int | None:
    nodes, builder = rewriter.program.nodes, rewriter.builder
    left, right = nodes[position].operands
    for product, vector in ((left, right), (right, left)):
        if nodes[product].op != "matmul" or rewriter.find_typed_map(vector) is None:
            continue
        x, matrix = nodes[product].operands
        if rewriter.find_typed_map(matrix) is None:
            continue
        what = "dot(x @ W, a) to dot(x, W a)"
        row_map = builder.find_type_map((rewriter.place[vector], rewriter.place[matrix]))
        if row_map is None:
            rewriter.decide(position, False, what, "W and a are not indexed by the same types")
            continue
        if not rewriter.is_only_used_by(product, position):
            rewriter.decide(position, False, what, "x @ W is needed elsewhere as well")
            continue
        cost = counts.rows(row_map.into) * _count_multiplications(
            nodes[matrix].shape, nodes[vector].shape
        )
        saved = count_rows(product) * _count_multiplications(nodes[matrix].shape, nodes[x].shape)
        reason = f"{cost:,} multiplications among weights for {saved:,} on rows"
        if not rewriter.decide(position, cost < saved, what, reason):
            continue
        transposed = not nodes[product]["transposed"]
        weights = builder.add(
            "matmul", rewriter.place[vector], rewriter.place[matrix], transposed=transposed
        )
        return builder.add("dot", rewriter.place[x], weights)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Chain:
    """`(x @ first) @ second`; the inner product is on edges, or on nodes and read at an `end`."""

    x: int
    first: int
    first_map: RowMap
    inner: int
    end: RowMap | None
    read: int
    """The inner product as the outer one reads it."""
    second: int
    is_split: bool
    """True if the inner product is reshaped before it is read."""


def _rewrite_product(
    rewriter: Rewriter, position: int, counts: Counts, count_rows: CountRows
) -> int | None:
    nodes = rewriter.program.nodes
    chain = _find_chain(rewriter, position)
    if chain is None:
        return None
    what = "(x @ V) @ W to x @ (V W)"
    objection = _find_objection(rewriter, position, chain, counts)
    if objection is not None:
        rewriter.decide(position, False, what, objection)
        return None
    (num_in, num_between), num_out = nodes[chain.first].shape, nodes[chain.second].shape[1]
    cost = counts.num_relations * num_in * num_between * num_out
    saved = count_rows(chain.inner) * num_in * num_between
    saved += count_rows(position) * (num_between - num_in) * num_out
    reason = f"{cost:,} multiplications among weights for {saved:,} on rows"
    if not rewriter.decide(position, cost < saved, what, reason):
        return None
    return _multiply_weights_first(rewriter, chain)


def _find_chain(rewriter: Rewriter, position: int) -> _Chain | None:
    """Return the product of products that ends at a matmul, if a weight has edge types."""
    nodes = rewriter.program.nodes
    read, second = nodes[position].operands
    end = nodes[read].map if nodes[read].op == "gather" else None
    end = end if end in _TYPE_AT_END else None
    inner = read if end is None else nodes[read].operands[0]
    is_split = nodes[inner].op == "reshape"
    if is_split:
        inner = nodes[inner].operands[0]
    if nodes[inner].op != "matmul":
        return None
    x, first = nodes[inner].operands
    first_map, second_map = rewriter.find_typed_map(first), rewriter.find_typed_map(second)
    is_typed_first = first_map == spaces.EDGE_TYPE and second_map == spaces.to_one(Space.EDGE)
    if first_map is None or (second_map != spaces.EDGE_TYPE and not is_typed_first):
        return None
    return _Chain(x, first, first_map, inner, end, read, second, is_split)


def _find_objection(rewriter: Rewriter, position: int, chain: _Chain, counts: Counts) -> str | None:
    """Return the reason why the weights of a chain cannot be multiplied first; else None."""
    nodes = rewriter.program.nodes
    if chain.is_split:
        return "x @ V is split into heads"
    weights = (nodes[chain.first], nodes[chain.second])
    if any(len(node.shape) != 2 for node in weights) or len(nodes[position].shape) != 1:
        return "V or W has heads"
    if nodes[chain.inner]["transposed"] or nodes[position]["transposed"]:
        return "a weight is transposed"
    if chain.first_map == spaces.NODE_TYPE_OF and not counts.is_canonical:
        return "relations of this graph do not decide node types"
    reader = position if chain.end is None else chain.read
    is_only_one = rewriter.is_only_used_by(chain.inner, reader)
    if not (is_only_one and rewriter.is_only_used_by(chain.read, position)):
        return "x @ V is needed elsewhere as well"
    return None


def _multiply_weights_first(rewriter: Rewriter, chain: _Chain) -> int:
    builder = rewriter.builder
    first, second = rewriter.place[chain.first], rewriter.place[chain.second]
    vector = rewriter.place[chain.x]
    if chain.end is not None:
        # From the nodes to the edges: the weight of the type that the relation has at that end.
        vector = builder.add("gather", vector, map=chain.end)
        is_untyped = chain.first_map.into is Space.ONE
        row_map = spaces.to_one(Space.RELATION) if is_untyped else _TYPE_AT_END[chain.end]
        of_relation = builder.add("gather", builder.nodes[first].operands[0], map=row_map)
        first = builder.add("gather", of_relation, map=spaces.EDGE_TYPE)
    product = builder.add("matmul", first, second, transposed=False)
    return builder.add("matmul", vector, product, transposed=False)


def _count_multiplications(matrix: Shape, vector: Shape) -> int:
    """Return the multiplications of one row: a product per head of the larger operand."""
    *heads, rows, columns = matrix
    num_heads = max([*heads, *vector[:-1], 1])
    return num_heads * rows * columns


def split_concat(program: Program) -> PassResult:
    """Split products with concatenated vectors, where the parts depend on different things."""
    depends = find_coordinates(program)

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        node = program.nodes[position]
        if node.op == "matmul":
            sides = (0,)
        elif node.op == "dot":
            sides = (0, 1)
        else:
            return None
        for side in sides:
            parts = program.nodes[node.operands[side]]
            if parts.op != "concat" or parts["axis"] != len(parts.shape) - 1:
                continue
            what = f"{node.op} with a concat of {len(parts.operands)}"
            if len({depends[part] for part in parts.operands}) == 1:
                rewriter.decide(position, False, what, "the parts need the same rows")
                continue
            rewriter.decide(position, True, what, "the parts need different rows")
            return _split_product(rewriter, position, side)
        return None

    return Rewriter(program, "split concat").run(rewrite)


def _split_product(rewriter: Rewriter, position: int, side: int) -> int:
    node = rewriter.program.nodes[position]
    parts = rewriter.program.nodes[node.operands[side]]
    other = rewriter.place[node.operands[1 - side]]
    shape = rewriter.builder.nodes[other].shape
    # The axis of the other operand that the concatenated features are contracted with.
    axis = len(shape) - 1
    if node.op == "matmul" and not node["transposed"]:
        axis = len(shape) - 2
    total, begin = None, 0
    for part in parts.operands:
        end = begin + rewriter.program.nodes[part].shape[-1]
        piece = rewriter.builder.add("slice", other, axis=axis, begin=begin, end=end)
        term = rewriter.builder.add(node.op, rewriter.place[part], piece, **dict(node.attributes))
        total = term if total is None else rewriter.builder.add("add", total, term)
        begin = end
    assert total is not None
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaled:
    """A product times edge scalars and plain numbers, as found below a sum."""

    product: int
    scales: tuple[int, ...]
    factor: float
    chain: tuple[int, ...]
    """The nodes from the one below the sum down to the product."""


def aggregate_first(program: Program, counts: Counts, can_compact: bool) -> PassResult:
    """Move typed products behind the sums to nodes, where that leaves fewer rows to multiply.

    `can_compact` is whether the product would otherwise be computed on as few rows as it can.
    """
    count_rows = make_row_counter(program, counts, can_compact)

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        node = program.nodes[position]
        if node.op != "sum" or node.map not in _STEPS:
            return None
        found = _find_product(program, node.operands[0])
        if found is None:
            return None
        weight_map = rewriter.find_typed_map(program.nodes[found.product].operands[1])
        if weight_map != spaces.EDGE_TYPE:
            return None
        num_rows, num_pairs = count_rows(found.product), counts.rows(_STEPS[node.map][0].into)
        if not _should_apply(rewriter, position, found, num_rows, num_pairs):
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
