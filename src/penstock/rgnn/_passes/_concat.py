"""A product with a concatenation is a sum of products with its parts.

`concat(a, b) @ W` is `a @ W_a + b @ W_b`, and the same for `dot`. The concatenation, which depends
on all that its parts depend on, is then not made; each product is computed on the rows that its own
part needs.
"""

from __future__ import annotations

from penstock.rgnn._ir import Program, dependencies
from penstock.rgnn._passes._decision import Rewritten, Walk


def split_concat(program: Program) -> Rewritten:
    """Split products with concatenated vectors, where the parts depend on different things."""
    depends = dependencies(program)

    def rewrite(walk: Walk, position: int) -> int | None:
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
                walk.decide(position, False, what, "the parts need the same rows")
                continue
            walk.decide(position, True, what, "the parts need different rows")
            return _split(walk, position, side)
        return None

    return Walk(program, "split concat").run(rewrite)


def _split(walk: Walk, position: int, side: int) -> int:
    node = walk.program.nodes[position]
    parts = walk.program.nodes[node.operands[side]]
    other = walk.place[node.operands[1 - side]]
    shape = walk.builder.nodes[other].shape
    # The axis of the other operand that the concatenated features are contracted with.
    axis = len(shape) - 1
    if node.op == "matmul" and not node["transposed"]:
        axis = len(shape) - 2
    total, begin = None, 0
    for part in parts.operands:
        end = begin + walk.program.nodes[part].shape[-1]
        piece = walk.builder.add("slice", other, axis=axis, begin=begin, end=end)
        term = walk.builder.add(node.op, walk.place[part], piece, **dict(node.attributes))
        total = term if total is None else walk.builder.add("add", total, term)
        begin = end
    assert total is not None
    return total
