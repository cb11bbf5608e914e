"""Reverse-mode differentiation of a program into a program.

The transpose of a gather is the sum along the same map and the other way round, so the backward of
a program that is laid out on few rows is laid out on few rows by itself. Where a matrix of types is
read per row, its adjoint is an `outer` per row; those go straight into the sum over rows, one by
one, and are never added up before it: a lowered program multiplies them as matrices and forms none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.rgnn.ir import Node, Program, ProgramBuilder, Shape
from penstock.rgnn.passes._decision import Rewriter

_NOWHERE = -1
"""The position of a value that nothing reads."""


def name_seed(output: int) -> str:
    """Return the name of the input with the gradient of the given output."""
    return f"gradient of output {output}"


def differentiate(program: Program, wrt: Sequence[str]) -> tuple[Program, tuple[str, ...]]:
    """Append the gradients of a program's outputs with respect to some of its inputs.

    Args:
        program: Without `outer`, which only a derivative has.
        wrt: Names of inputs.

    Returns:
        The joint program, with a gradient for each name behind the outputs of the original; and the
        names that have one: those of `wrt` that an output depends on. The program has an input
        `name_seed(k)` for the gradient of output `k`, with its rows and its row shape.
    """
    builder = ProgramBuilder()
    for node in program.nodes:
        builder.copy(node, node.operands)
    assert len(builder.nodes) == len(program.nodes), "a program is built the same way twice"
    is_active = _find_active(program, frozenset(wrt))
    terms: dict[int, list[int]] = {}
    for output, position in enumerate(program.outputs):
        node = program.nodes[position]
        if is_active[position]:
            seed = builder.input(name_seed(output), node.space, node.shape)
            terms.setdefault(position, []).append(seed)
    gradients: dict[str, int] = {}
    for position in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[position]
        if position not in terms:
            continue
        builder.where = node.where
        if node.op == "input":
            gradients[node["name"]] = _add_terms(builder, terms[position])
            continue
        for adjoint in _join_terms(builder, node, terms.pop(position)):
            found = _RULES[node.op](builder, node, position, adjoint)
            for operand, term in zip(node.operands, found, strict=False):  # some have no terms
                if is_active[operand]:
                    terms.setdefault(operand, []).append(term)
    reached = tuple(name for name in wrt if name in gradients)
    outputs = (*program.outputs, *(gradients[name] for name in reached))
    return builder.program(outputs), reached


def drop_seeds(
    program: Program, wrt: Sequence[str], seeds: Collection[str]
) -> tuple[Program, tuple[str, ...]]:
    """Leave out of a joint program what some of its seeds alone make.

    The gradient of an output that a loss does not use is not a row of zeros: those times an
    infinite derivative are NaN, and an input that no other output depends on has no gradient.

    Args:
        program: Outputs, then a gradient for each name of `wrt`, all linear in the seeds.
        wrt: Names of inputs.
        seeds: Names of the seeds to leave out.

    Returns:
        The program and the names that still have a gradient, as `differentiate` returns them.
        Values that depend on no seed have the positions that they had.
    """
    dropped = _find_dropped(program, seeds)

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        if position in dropped:
            return _NOWHERE
        node = program.nodes[position]
        rest = [operand for operand in node.operands if operand not in dropped]
        if len(rest) == len(node.operands):
            return None
        assert node.op == "add", node  # terms of one adjoint, all of its shape
        return rewriter.place[rest[0]]

    num_outputs = len(program.outputs) - len(wrt)
    gradients = zip(wrt, program.outputs[num_outputs:], strict=True)
    kept = {name: position for name, position in gradients if position not in dropped}
    outputs = (*program.outputs[:num_outputs], *kept.values())
    rewritten = Rewriter(dataclasses.replace(program, outputs=outputs), "drop seeds").run(rewrite)
    return rewritten[0], tuple(kept)


def _find_dropped(program: Program, seeds: Collection[str]) -> set[int]:
    """Return the positions of what some seeds, and no others, make."""
    dropped: set[int] = set()
    for position, node in enumerate(program.nodes):
        is_dropped = [operand in dropped for operand in node.operands]
        if node.op == "input":
            is_dropped = [node["name"] in seeds]
        if any(is_dropped) and (node.op not in ("add", "sub") or all(is_dropped)):
            dropped.add(position)
    return dropped


def _find_active(program: Program, wrt: frozenset[str]) -> list[bool]:
    """Return, for each node, whether it depends on an input of `wrt`."""
    is_active: list[bool] = []
    for node in program.nodes:
        is_wanted = node.op == "input" and node["name"] in wrt
        is_active.append(is_wanted or any(is_active[operand] for operand in node.operands))
    return is_active


def _join_terms(builder: ProgramBuilder, node: Node, terms: list[int]) -> list[int]:
    """Return the adjoint in as few terms as may be: an outer is not added before its sum."""
    if node.op != "gather":
        return [_add_terms(builder, terms)]
    alone = [term for term in terms if builder.nodes[term].op == "outer"]
    rest = [term for term in terms if builder.nodes[term].op != "outer"]
    return alone + ([_add_terms(builder, rest)] if rest else [])


def _add_terms(builder: ProgramBuilder, terms: list[int]) -> int:
    total = terms[0]
    for term in terms[1:]:
        total = builder.add("add", total, term)
    return total


def _sum_stretched(builder: ProgramBuilder, position: int, shape: Shape) -> int:
    """Sum over the axes along which a row of `shape` was stretched."""
    found = builder.nodes[position].shape
    padded = shape + (1,) * (len(found) - len(shape))
    axes = tuple(
        axis
        for axis, (wide, narrow) in enumerate(zip(found, padded, strict=True))
        if wide != narrow
    )
    if axes:
        position = builder.add("total", position, axes=axes)
    if builder.nodes[position].shape != shape:
        position = builder.add("reshape", position, shape=shape)
    return position


def _multiply(builder: ProgramBuilder, g: int, other: int, shape: Shape) -> int:
    """Return `g * other`, summed over the axes along which a row of `shape` was stretched."""
    found = builder.nodes[g].shape
    if found and found == builder.nodes[other].shape and shape == found[:-1]:
        return builder.add("dot", g, other)  # a scalar scaled a vector: no product per feature
    return _sum_stretched(builder, builder.add("mul", g, other), shape)


Rule = Callable[[ProgramBuilder, Node, int, int], Iterable[int]]
"""From a node, its position and its adjoint g: a term of the adjoint of each operand."""


def _softmax(b: ProgramBuilder, node: Node, at: int, g: int) -> Iterable[int]:
    # dx = y * (g - sum of y * g over the rows of one target)
    weighted = b.add("mul", at, g)
    mean = b.add("gather", b.add("sum", weighted, map=node.map), map=node.map)
    yield b.add("sub", weighted, b.add("mul", at, mean))


def _sub(b: ProgramBuilder, node: Node, at: int, g: int) -> Iterable[int]:
    left, right = node.operands
    yield _sum_stretched(b, g, b.nodes[left].shape)
    yield _sum_stretched(b, b.add("scale", g, value=-1.0), b.nodes[right].shape)


def _div(b: ProgramBuilder, node: Node, at: int, g: int) -> Iterable[int]:
    # y = l / r: dl = g / r, dr = -g * y / r
    left, right = node.operands
    share = b.add("div", g, right)
    yield _sum_stretched(b, share, b.nodes[left].shape)
    minus = b.add("scale", b.add("mul", share, at), value=-1.0)
    yield _sum_stretched(b, minus, b.nodes[right].shape)


def _matmul(b: ProgramBuilder, node: Node, at: int, g: int) -> Iterable[int]:
    # y = x W: dx = g W^T, dW = x^T g
    vector, matrix = node.operands
    transposed = node["transposed"]
    back = b.add("matmul", g, matrix, transposed=not transposed)
    yield _sum_stretched(b, back, b.nodes[vector].shape)
    ends = (g, vector) if transposed else (vector, g)
    yield b.add("outer", *ends, heads=len(b.nodes[matrix].shape) - 2)


def _concat(b: ProgramBuilder, node: Node, at: int, g: int) -> Iterable[int]:
    axis, begin = node["axis"], 0
    for operand in node.operands:
        length = b.nodes[operand].shape[axis]
        yield _slice(b, g, axis, begin, length)
        begin += length


def _slice(b: ProgramBuilder, x: int, axis: int, begin: int, length: int) -> int:
    return b.add("slice", x, axis=axis, begin=begin, end=begin + length)


def _pair(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each of two operands with the other one."""
    return node.operands, node.operands[::-1]


def _subtract_from_one(b: ProgramBuilder, x: int) -> int:
    return b.add("shift", b.add("scale", x, value=-1.0), value=1.0)


def _find_shapes(b: ProgramBuilder, node: Node) -> list[Shape]:
    return [b.nodes[operand].shape for operand in node.operands]


def _measure_axis(b: ProgramBuilder, node: Node) -> int:
    return b.nodes[node.operands[0]].shape[node["axis"]]


_RULES: dict[str, Rule] = {
    "inverse_count": lambda b, node, at, g: (),
    "gather": lambda b, node, at, g: (b.add("sum", g, map=node.map),),
    "sum": lambda b, node, at, g: (b.add("gather", g, map=node.map),),
    "softmax": _softmax,
    "add": lambda b, node, at, g: (_sum_stretched(b, g, s) for s in _find_shapes(b, node)),
    "sub": _sub,
    "mul": lambda b, node, at, g: (
        _multiply(b, g, other, b.nodes[of].shape) for of, other in _pair(node)
    ),
    "div": _div,
    "scale": lambda b, node, at, g: (b.add("scale", g, value=node["value"]),),
    "shift": lambda b, node, at, g: (g,),
    # y = 1 / x: dx = -g * y**2
    "reciprocal": lambda b, node, at, g: (
        b.add("scale", b.add("mul", g, b.add("mul", at, at)), value=-1.0),
    ),
    "exp": lambda b, node, at, g: (b.add("mul", g, at),),
    "log": lambda b, node, at, g: (b.add("div", g, node.operands[0]),),
    # dx = g * (1 - y**2)
    "tanh": lambda b, node, at, g: (b.add("mul", g, _subtract_from_one(b, b.add("mul", at, at))),),
    # dx = g * y * (1 - y)
    "sigmoid": lambda b, node, at, g: (
        b.add("mul", g, b.add("mul", at, _subtract_from_one(b, at))),
    ),
    "relu": lambda b, node, at, g: (b.add("relu_gradient", g, at),),
    "leaky_relu": lambda b, node, at, g: (
        b.add("mul", g, b.add("leaky_relu_slope", node.operands[0], value=node["value"])),
    ),
    "leaky_relu_slope": lambda b, node, at, g: (),
    "dot": lambda b, node, at, g: (
        _sum_stretched(b, b.add("mul", g, other), b.nodes[of].shape) for of, other in _pair(node)
    ),
    "matmul": _matmul,
    "reshape": lambda b, node, at, g: (
        b.add("reshape", g, shape=shape) for shape in _find_shapes(b, node)
    ),
    "expand": lambda b, node, at, g: (_sum_stretched(b, g, s) for s in _find_shapes(b, node)),
    "total": lambda b, node, at, g: (
        b.add("expand", g, shape=shape) for shape in _find_shapes(b, node)
    ),
    "concat": _concat,
    "slice": lambda b, node, at, g: (
        b.add("pad", g, axis=node["axis"], begin=node["begin"], size=_measure_axis(b, node)),
    ),
    "pad": lambda b, node, at, g: (
        _slice(b, g, node["axis"], node["begin"], _measure_axis(b, node)),
    ),
}
