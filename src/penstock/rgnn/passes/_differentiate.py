"""Reverse-mode differentiation of a program into a program.

The transpose of a gather is the sum along the same map and the other way round, so the backward of
a program that is laid out on few rows is laid out on few rows by itself. Where a matrix of types is
read per row, its adjoint is an `outer` per row; those go straight into the sum over rows, one by
one, and are never added up before it: a lowered program multiplies them as matrices and forms none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from penstock.rgnn.ir import Builder, Node, Program, Shape

Contribution = tuple[int, int]
"""An operand of the node at hand (its place among them) and a term of its adjoint."""


@dataclasses.dataclass(frozen=True, slots=True)
class JointProgram:
    """A program that computes what another does, and then gradients."""

    program: Program
    """Outputs of the original, then one gradient for each name in `wrt`."""
    num_outputs: int
    """How many outputs the original has."""
    wrt: tuple[str, ...]
    """The inputs that have a gradient: those of the asked-for ones that an output depends on."""

    @staticmethod
    def seed(output: int) -> str:
        """The name of the input with the gradient of the given output."""
        return f"gradient of output {output}"


def differentiate(program: Program, wrt: Sequence[str]) -> JointProgram:
    """Append the gradients of a program's outputs with respect to some of its inputs.

    Example:
        >>> joint = differentiate(program, ["W"])  # doctest: +SKIP
        >>> joint.program.outputs[joint.num_outputs :]  # doctest: +SKIP
        (17,)

    Args:
        program: Without `outer`, which only a derivative has.
        wrt: Names of inputs.

    Returns:
        The joint program. It has an input `JointProgram.seed(k)` for the gradient of output `k`,
        with the rows and the row shape of that output.
    """
    builder = Builder()
    for node in program.nodes:
        builder.copy(node, node.operands)
    assert len(builder.nodes) == len(program.nodes), "a program is built the same way twice"
    is_active = _active(program, frozenset(wrt))
    terms: dict[int, list[int]] = {}
    for output, position in enumerate(program.outputs):
        node = program.nodes[position]
        if is_active[position]:
            seed = builder.input(JointProgram.seed(output), node.space, node.shape)
            terms.setdefault(position, []).append(seed)
    gradients: dict[str, int] = {}
    for position in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[position]
        if position not in terms:
            continue
        builder.where = node.where
        if node.op == "input":
            gradients[node["name"]] = _added(builder, terms[position])
            continue
        for adjoint in _to_push(builder, node, terms.pop(position)):
            for place, term in _RULES[node.op](builder, node, position, adjoint):
                if is_active[node.operands[place]]:
                    terms.setdefault(node.operands[place], []).append(term)
    reached = tuple(name for name in wrt if name in gradients)
    outputs = (*program.outputs, *(gradients[name] for name in reached))
    return JointProgram(builder.program(outputs), len(program.outputs), reached)


def _active(program: Program, wrt: frozenset[str]) -> list[bool]:
    """Which nodes depend on an input of `wrt`."""
    is_active: list[bool] = []
    for node in program.nodes:
        is_wanted = node.op == "input" and node["name"] in wrt
        is_active.append(is_wanted or any(is_active[operand] for operand in node.operands))
    return is_active


def _to_push(builder: Builder, node: Node, terms: list[int]) -> list[int]:
    """The adjoint in as few terms as may be: an outer stays alone on its way into a sum."""
    if node.op != "gather":
        return [_added(builder, terms)]
    alone = [term for term in terms if builder.nodes[term].op == "outer"]
    rest = [term for term in terms if builder.nodes[term].op != "outer"]
    return alone + ([_added(builder, rest)] if rest else [])


def _added(builder: Builder, terms: list[int]) -> int:
    total = terms[0]
    for term in terms[1:]:
        total = builder.add("add", total, term)
    return total


def _fitted(builder: Builder, position: int, shape: Shape) -> int:
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


def _scaled(builder: Builder, g: int, other: int, shape: Shape) -> int:
    """`g * other`, summed over the axes along which a row of `shape` was stretched."""
    found = builder.nodes[g].shape
    if found and found == builder.nodes[other].shape and shape == found[:-1]:
        return builder.add("dot", g, other)  # a scalar scaled a vector: no product per feature
    return _fitted(builder, builder.add("mul", g, other), shape)


# A rule gets the node, its position and its adjoint g, and yields terms of its operands' adjoints.
Rule = Callable[[Builder, Node, int, int], Iterator[Contribution]]


def _gather(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("sum", g, map=node.map)


def _sum(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("gather", g, map=node.map)


def _softmax(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    # y * (g - sum of y * g over the rows of one target)
    weighted = b.add("mul", at, g)
    mean = b.add("gather", b.add("sum", weighted, map=node.map), map=node.map)
    yield 0, b.add("sub", weighted, b.add("mul", at, mean))


def _add(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    for place, operand in enumerate(node.operands):
        yield place, _fitted(b, g, b.nodes[operand].shape)


def _sub(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    left, right = node.operands
    yield 0, _fitted(b, g, b.nodes[left].shape)
    yield 1, _fitted(b, b.add("scale", g, value=-1.0), b.nodes[right].shape)


def _mul(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    left, right = node.operands
    yield 0, _scaled(b, g, right, b.nodes[left].shape)
    yield 1, _scaled(b, g, left, b.nodes[right].shape)


def _div(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    # d(x / y) = g / y and -g * (x / y) / y
    left, right = node.operands
    share = b.add("div", g, right)
    yield 0, _fitted(b, share, b.nodes[left].shape)
    yield 1, _fitted(b, b.add("scale", b.add("mul", share, at), value=-1.0), b.nodes[right].shape)


def _scale(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("scale", g, value=node["value"])


def _shift(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, g


def _reciprocal(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("scale", b.add("mul", g, b.add("mul", at, at)), value=-1.0)


def _exp(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("mul", g, at)


def _log(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("div", g, node.operands[0])


def _tanh(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    # 1 - y**2
    slope = b.add("shift", b.add("scale", b.add("mul", at, at), value=-1.0), value=1.0)
    yield 0, b.add("mul", g, slope)


def _sigmoid(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    # y * (1 - y)
    rest = b.add("shift", b.add("scale", at, value=-1.0), value=1.0)
    yield 0, b.add("mul", g, b.add("mul", at, rest))


def _relu(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("relu_gradient", g, at)


def _leaky_relu(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    slope = b.add("leaky_relu_slope", node.operands[0], value=node["value"])
    yield 0, b.add("mul", g, slope)


def _dot(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    left, right = node.operands
    yield 0, _fitted(b, b.add("mul", g, right), b.nodes[left].shape)
    yield 1, _fitted(b, b.add("mul", g, left), b.nodes[right].shape)


def _matmul(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    vector, matrix = node.operands
    transposed = node["transposed"]
    back = b.add("matmul", g, matrix, transposed=not transposed)
    yield 0, _fitted(b, back, b.nodes[vector].shape)
    ends = (g, vector) if transposed else (vector, g)
    yield 1, b.add("outer", *ends, heads=len(b.nodes[matrix].shape) - 2)


def _reshape(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("reshape", g, shape=b.nodes[node.operands[0]].shape)


def _expand(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, _fitted(b, g, b.nodes[node.operands[0]].shape)


def _total(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield 0, b.add("expand", g, shape=b.nodes[node.operands[0]].shape)


def _concat(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    axis, begin = node["axis"], 0
    for place, operand in enumerate(node.operands):
        end = begin + b.nodes[operand].shape[axis]
        yield place, b.add("slice", g, axis=axis, begin=begin, end=end)
        begin = end


def _slice(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    axis = node["axis"]
    size = b.nodes[node.operands[0]].shape[axis]
    yield 0, b.add("pad", g, axis=axis, begin=node["begin"], size=size)


def _pad(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    axis, begin = node["axis"], node["begin"]
    end = begin + b.nodes[node.operands[0]].shape[axis]
    yield 0, b.add("slice", g, axis=axis, begin=begin, end=end)


def _nothing(b: Builder, node: Node, at: int, g: int) -> Iterator[Contribution]:
    yield from ()


_RULES: dict[str, Rule] = {
    "inverse_count": _nothing,
    "gather": _gather,
    "sum": _sum,
    "softmax": _softmax,
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "scale": _scale,
    "shift": _shift,
    "reciprocal": _reciprocal,
    "exp": _exp,
    "log": _log,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "leaky_relu_slope": _nothing,
    "dot": _dot,
    "matmul": _matmul,
    "reshape": _reshape,
    "expand": _expand,
    "total": _total,
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
}
