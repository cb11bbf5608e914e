"""Rowwise operators as Triton expressions, and the features of operands that they need."""

from __future__ import annotations

import math

from penstock.rgnn.backends.triton._body import Indices, KernelBody, Rule, Variable
from penstock.rgnn.backends.triton._index import ZERO, Axis, Index, index_axis, make_feature_axis
from penstock.rgnn.ir import Node, Shape, broadcast


def _stretch(indices: Indices, shape: Shape) -> Indices:
    """Return the features of a row of `shape` that is lined up from the left with a wider one."""
    return tuple(
        ZERO if length == 1 else index for index, length in zip(indices, shape, strict=False)
    )


def _elementwise(template: str) -> Rule:
    def rule(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
        operands = [
            body.read(operand, _stretch(indices, body.nodes[operand].shape))
            for operand in node.operands
        ]
        text = template
        if "VALUE" in text:
            value = float(node["value"])
            text = text.replace(
                "VALUE", repr(value) if math.isfinite(value) else f'float("{value}")'
            )
        return body.compute(text, *operands, name=name)

    return rule


def _make_inner_axis(indices: Indices, length: int, further: int = 0) -> Axis | None:
    """Return a new axis beside those of the indices; None for a single feature."""
    if length == 1:
        return None
    depths = [axis.depth for index in indices for axis in index.axes()]
    return make_feature_axis(max(depths, default=-1) + 1 + further, length)


def _index_along(axis: Axis | None) -> Index:
    return ZERO if axis is None else index_axis(axis)


def _sum_axes(body: KernelBody, block: Variable, axes: list[Axis | None], name: str) -> Variable:
    for axis in axes:
        if axis is not None:
            block = body.sum_axis(block, axis, name)
    return block


def _contract(
    body: KernelBody, node: Node, reads: list[Indices], axes: list[Axis | None], name: str
) -> Variable:
    """Sum the product of two operands, at the features that `reads` has for each, over axes."""
    operands = (body.read(*each) for each in zip(node.operands, reads, strict=True))
    product = body.compute("{0} * {1}", *operands, name=f"{name}_terms")
    return _sum_axes(body, product, axes, name)


def _dot(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    axis = _make_inner_axis(indices, shapes[0][-1])
    reads = [(*_stretch(indices, shape[:-1]), _index_along(axis)) for shape in shapes]
    return _contract(body, node, reads, [axis], name)


def _matmul(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    vector, matrix = (body.nodes[operand].shape for operand in node.operands)
    axis = _make_inner_axis(indices, vector[-1])
    inner = _index_along(axis)
    ends = (indices[-1], inner) if node["transposed"] else (inner, indices[-1])
    reads = [(*_stretch(indices, vector[:-1]), inner), (*_stretch(indices, matrix[:-2]), *ends)]
    return _contract(body, node, reads, [axis], name)


def _outer(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    heads = node["heads"]
    lengths = broadcast(shapes[0][:-1], shapes[1][:-1])[heads:]
    axes = [_make_inner_axis(indices, length, further) for further, length in enumerate(lengths)]
    batch = (*indices[:heads], *map(_index_along, axes))
    ends = zip(shapes, indices[-2:], strict=True)
    reads = [(*_stretch(batch, shape[:-1]), index) for shape, index in ends]
    return _contract(body, node, reads, axes, name)


def _expand(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    (operand,) = node.operands
    return body.read(operand, _stretch(indices, body.nodes[operand].shape))


def _total(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    (operand,) = node.operands
    shape = body.nodes[operand].shape
    axes = {
        place: _make_inner_axis(indices, shape[place], further)
        for further, place in enumerate(node["axes"])
    }
    read = tuple(
        _index_along(axes[place]) if place in axes else index for place, index in enumerate(indices)
    )
    return _sum_axes(body, body.read(operand, read), list(axes.values()), name)


def _read_part(
    body: KernelBody, operand: int, indices: Indices, place: int, begin: int
) -> tuple[Variable, Variable]:
    """Read what lies from `begin` on along an axis, and the mask of the lanes that have some."""
    length, index = body.nodes[operand].shape[place], indices[place]
    at = ZERO if length == 1 else index.plus(-begin)
    part = body.read(operand, (*indices[:place], at, *indices[place + 1 :]))
    return part, body.is_between(index, begin, begin + length)


def _concat(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    first, *others = node.operands
    found, _ = _read_part(body, first, indices, node["axis"], 0)
    begin = body.nodes[first].shape[node["axis"]]
    for operand in others:
        part, is_here = _read_part(body, operand, indices, node["axis"], begin)
        found = body.compute("tl.where({0}, {1}, {2})", is_here, part, found, name=name)
        begin += body.nodes[operand].shape[node["axis"]]
    return found


def _slice(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    place = node["axis"]
    index = indices[place].plus(node["begin"])
    return body.read(node.operands[0], (*indices[:place], index, *indices[place + 1 :]))


def _pad(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    part, is_here = _read_part(body, node.operands[0], indices, node["axis"], node["begin"])
    return body.compute("tl.where({0}, {1}, 0.0)", is_here, part, name=name)


RULES: dict[str, Rule] = {
    "add": _elementwise("{0} + {1}"),
    "sub": _elementwise("{0} - {1}"),
    "mul": _elementwise("{0} * {1}"),
    "div": _elementwise("{0} / {1}"),
    "scale": _elementwise("{0} * VALUE"),
    "shift": _elementwise("{0} + VALUE"),
    "reciprocal": _elementwise("1 / {0}"),
    "exp": _elementwise("tl.exp({0})"),
    "log": _elementwise("tl.log({0})"),
    "tanh": _elementwise("tanh({0})"),
    "sigmoid": _elementwise("sigmoid({0})"),
    "relu": _elementwise("tl.where({0} <= 0, 0.0, {0})"),
    "relu_gradient": _elementwise("tl.where({1} <= 0, 0.0, {0})"),
    "leaky_relu": _elementwise("tl.where({0} > 0, {0}, {0} * VALUE)"),
    "leaky_relu_slope": _elementwise(
        "tl.where({0} > 0, tl.full({0}.shape, 1.0, COMPUTE), tl.full({0}.shape, VALUE, COMPUTE))"
    ),
    "dot": _dot,
    "matmul": _matmul,
    "outer": _outer,
    "expand": _expand,
    "total": _total,
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
}
"""By operator: an expression for some features of its result."""
