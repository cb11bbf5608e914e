"""Linear operators in a better order: weights are multiplied with weights first.

- `dot(x @ W[r], a[r])` is `dot(x, W[r] a[r])`.
- `(x @ V[t]) @ W[r]` is `x @ (V[t] W[r])`, where the relation decides the node type.

Both are exact because all operators between are linear. They pay where the intermediate serves
nothing else and there are fewer types than rows. (Hector, ASPLOS'24, linear operator reordering.)
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.rgnn import _rows
from penstock.rgnn._ir import Program, Shape, dependencies
from penstock.rgnn._passes._compact import fewest_rows
from penstock.rgnn._passes._decision import Rewritten, Walk
from penstock.rgnn._rows import Counts, RowMap, Space

RowsOf = Callable[[int], int]
"""On how many rows a value of the program is computed."""

_TYPE_AT_END = {
    _rows.EDGE_SRC: _rows.RELATION_SRC_TYPE,
    _rows.EDGE_DST: _rows.RELATION_DST_TYPE,
}


def reorder(program: Program, counts: Counts) -> Rewritten:
    """Multiply weights with weights first, where that is legal and saves work."""
    depends = dependencies(program)

    def rows_of(position: int) -> int:
        return fewest_rows(program.nodes[position].space, depends[position], counts)

    def rewrite(walk: Walk, position: int) -> int | None:
        op = program.nodes[position].op
        if op == "dot":
            return _dot_of_product(walk, position, counts, rows_of)
        if op == "matmul":
            return _product_of_products(walk, position, counts, rows_of)
        return None

    return Walk(program, "reorder").run(rewrite)


def _dot_of_product(walk: Walk, position: int, counts: Counts, rows_of: RowsOf) -> int | None:
    nodes, builder = walk.program.nodes, walk.builder
    left, right = nodes[position].operands
    for product, vector in ((left, right), (right, left)):
        if nodes[product].op != "matmul" or walk.typed_map(vector) is None:
            continue
        x, matrix = nodes[product].operands
        if walk.typed_map(matrix) is None:
            continue
        what = "dot(x @ W, a) to dot(x, W a)"
        row_map = builder.type_map((walk.place[vector], walk.place[matrix]))
        if row_map is None:
            walk.decide(position, False, what, "W and a are not indexed by the same types")
            continue
        if not walk.is_only_used_by(product, position):
            walk.decide(position, False, what, "x @ W is needed elsewhere as well")
            continue
        cost = counts.rows(row_map.into) * _work(nodes[matrix].shape, nodes[vector].shape)
        saved = rows_of(product) * _work(nodes[matrix].shape, nodes[x].shape)
        reason = f"{cost:,} multiplications among weights for {saved:,} on rows"
        if not walk.decide(position, cost < saved, what, reason):
            continue
        transposed = not nodes[product]["transposed"]
        weights = builder.add(
            "matmul", walk.place[vector], walk.place[matrix], transposed=transposed
        )
        return builder.add("dot", walk.place[x], weights)
    return None


def _product_of_products(walk: Walk, position: int, counts: Counts, rows_of: RowsOf) -> int | None:
    nodes, builder = walk.program.nodes, walk.builder
    outer = nodes[position]
    read, second = outer.operands
    second_map = walk.typed_map(second)
    # The inner product is on edges, or on nodes and read at an end.
    end = nodes[read].map if nodes[read].op == "gather" else None
    inner = nodes[read].operands[0] if end in _TYPE_AT_END else read
    if nodes[inner].op != "matmul":
        return None
    x, first = nodes[inner].operands
    first_map = walk.typed_map(first)
    # One of the two has a matrix per relation; with two untyped weights nothing is gained by us.
    is_second_untyped = inner == read and second_map == _rows.to_one(Space.EDGE)
    if second_map != _rows.EDGE_TYPE and not (is_second_untyped and first_map == _rows.EDGE_TYPE):
        return None
    if first_map is None:
        return None
    what = "(x @ V) @ W to x @ (V W)"
    if len(nodes[first].shape) != 2 or len(nodes[second].shape) != 2 or len(outer.shape) != 1:
        walk.decide(position, False, what, "V or W has heads")
        return None
    if nodes[inner]["transposed"] or outer["transposed"]:
        walk.decide(position, False, what, "a weight is transposed")
        return None
    if first_map == _rows.NODE_TYPE_OF and not counts.is_canonical:
        walk.decide(position, False, what, "relations of this graph do not decide node types")
        return None
    is_only = walk.is_only_used_by(inner, position if end not in _TYPE_AT_END else read)
    if not (is_only and walk.is_only_used_by(read, position)):
        walk.decide(position, False, what, "x @ V is needed elsewhere as well")
        return None
    (num_in, num_between), num_out = nodes[first].shape, nodes[second].shape[1]
    cost = counts.num_relations * num_in * num_between * num_out
    saved = rows_of(inner) * num_in * num_between
    saved += rows_of(position) * (num_between - num_in) * num_out
    reason = f"{cost:,} multiplications among weights for {saved:,} on rows"
    if not walk.decide(position, cost < saved, what, reason):
        return None
    weight = builder.nodes[walk.place[first]].operands[0]
    if end in _TYPE_AT_END:
        vector = builder.add("gather", walk.place[x], map=end)
        by_relation = _weight_by_relation(walk, weight, first_map, end)
    else:
        vector = walk.place[x]
        by_relation = builder.add("gather", weight, map=first_map)
        product = builder.add("matmul", by_relation, walk.place[second], transposed=False)
        return builder.add("matmul", vector, product, transposed=False)
    second_weight = builder.nodes[walk.place[second]].operands[0]
    product = builder.add("matmul", by_relation, second_weight, transposed=False)
    product = builder.add("gather", product, map=_rows.EDGE_TYPE)
    return builder.add("matmul", vector, product, transposed=False)


def _weight_by_relation(walk: Walk, weight: int, first_map: RowMap, end: RowMap) -> int:
    """The node-typed or untyped weight at an end of each relation."""
    if first_map.into is Space.ONE:
        return walk.builder.add("gather", weight, map=_rows.to_one(Space.RELATION))
    return walk.builder.add("gather", weight, map=_TYPE_AT_END[end])


def _work(matrix: Shape, vector: Shape) -> int:
    """Multiplications of one row: a product per head of the larger operand."""
    *heads, rows, columns = matrix
    num_heads = max([*heads, *vector[:-1], 1])
    return num_heads * rows * columns
