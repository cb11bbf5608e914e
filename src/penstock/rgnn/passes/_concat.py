"""Splitting of products with a concatenation into sums of products with its parts.

`concat(a, b) @ W` is `a @ W_a + b @ W_b`, and the same for `dot`. The concatenation, which depends
on all that its parts depend on, is then not made; each product is computed on the rows that its own
part needs.
"""

from __future__ import annotations

from penstock.rgnn.ir import Program, find_coordinates
from penstock.rgnn.passes._decision import PassResult, Rewriter


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
            return _split(rewriter, position, side)
        return None

    return Rewriter(program, "split concat").run(rewrite)


def _split(rewriter: Rewriter, position: int, side: int) -> int:
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
