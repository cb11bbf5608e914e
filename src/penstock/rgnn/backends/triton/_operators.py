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
    body: KernelBody, operands: list[Variable], axes: list[Axis | None], name: str
) -> Variable:
    product = body.compute("{0} * {1}", *operands, name=f"{name}_terms")
    return _sum_axes(body, product, axes, name)


def _dot(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    axis = _make_inner_axis(indices, shapes[0][-1])
    operands = [
        body.read(operand, (*_stretch(indices, shape[:-1]), _index_along(axis)))
        for operand, shape in zip(node.operands, shapes, strict=True)
    ]
    return _contract(body, operands, [axis], name)


def _matmul(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    vector, matrix = node.operands
    batch = body.nodes[vector].shape[:-1]
    *heads, _, _ = body.nodes[matrix].shape
    axis = _make_inner_axis(indices, body.nodes[vector].shape[-1])
    left = body.read(vector, (*_stretch(indices, batch), _index_along(axis)))
    ends = (_index_along(axis), indices[-1])
    if node["transposed"]:
        ends = ends[::-1]
    right = body.read(matrix, (*_stretch(indices, tuple(heads)), *ends))
    return _contract(body, [left, right], [axis], name)


def _outer(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    heads = node["heads"]
    lengths = broadcast(shapes[0][:-1], shapes[1][:-1])[heads:]
    axes = [_make_inner_axis(indices, length, further) for further, length in enumerate(lengths)]
    batch = (*indices[:heads], *map(_index_along, axes))
    operands = [
        body.read(operand, (*_stretch(batch, shape[:-1]), index))
        for operand, shape, index in zip(node.operands, shapes, indices[-2:], strict=True)
    ]
    return _contract(body, operands, axes, name)


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


def _concat(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    place = node["axis"]
    index, begin = indices[place], 0
    found: Variable | None = None
    for operand in node.operands:
        length = body.nodes[operand].shape[place]
        at = ZERO if length == 1 else index.plus(-begin)
        part = body.read(operand, (*indices[:place], at, *indices[place + 1 :]))
        if found is None:
            found = part
        else:
            is_here = body.is_between(index, begin, begin + length)
            found = body.compute("tl.where({0}, {1}, {2})", is_here, part, found, name=name)
        begin += length
    assert found is not None
    return found


def _slice(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    place = node["axis"]
    index = indices[place].plus(node["begin"])
    return body.read(node.operands[0], (*indices[:place], index, *indices[place + 1 :]))


def _pad(body: KernelBody, node: Node, indices: Indices, name: str) -> Variable:
    place, begin = node["axis"], node["begin"]
    (operand,) = node.operands
    length = body.nodes[operand].shape[place]
    index = indices[place]
    at = ZERO if length == 1 else index.plus(-begin)
    part = body.read(operand, (*indices[:place], at, *indices[place + 1 :]))
    is_here = body.is_between(index, begin, begin + length)
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
