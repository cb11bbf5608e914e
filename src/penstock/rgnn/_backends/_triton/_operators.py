"""Rowwise operators as Triton expressions: which features of its operands a feature needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

from penstock.rgnn._backends._triton._index import (
    ZERO,
    Axis,
    Index,
    feature_axis,
    of_axis,
)
from penstock.rgnn._ir import Node, Shape, broadcast

Indices = tuple[Index, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A variable: its leading axes (of groups and rows) and then those of features."""

    name: str
    axes: tuple[Axis, ...] = ()
    is_shared: bool = False
    """Whether it is the same for all rows of a group."""


class Body(Protocol):
    """The statements of a traversal, as `_body.py` writes them."""

    nodes: tuple[Node, ...]

    def read(self, position: int, indices: Indices) -> Block:
        """The features of a value, as a variable."""
        ...

    def compute(self, template: str, *operands: Block, name: str) -> Block:
        """An elementwise expression in which `{0}`, `{1}`, ... stand for operands."""
        ...

    def added_up(self, block: Block, axis: Axis, name: str) -> Block:
        """The sum over an axis of features."""
        ...

    def is_between(self, index: Index, begin: int, end: int) -> Block:
        """Where an index lies in a half-open interval."""
        ...


Rule = Callable[[Body, Node, Indices, str], Block]


def _stretched(indices: Indices, shape: Shape) -> Indices:
    """The features of a row of `shape` where it is lined up from the left with a wider one."""
    return tuple(
        ZERO if length == 1 else index for index, length in zip(indices, shape, strict=False)
    )


def _elementwise(template: str) -> Rule:
    def rule(body: Body, node: Node, indices: Indices, name: str) -> Block:
        operands = [
            body.read(operand, _stretched(indices, body.nodes[operand].shape))
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


def _inner_axis(indices: Indices, length: int, further: int = 0) -> Axis | None:
    """A new axis beside those of the indices; None where one feature needs none."""
    if length == 1:
        return None
    depths = [axis.depth for index in indices for axis in index.axes()]
    return feature_axis(max(depths, default=-1) + 1 + further, length)


def _along(axis: Axis | None) -> Index:
    return ZERO if axis is None else of_axis(axis)


def _added_up(body: Body, block: Block, axes: list[Axis | None], name: str) -> Block:
    for axis in axes:
        if axis is not None:
            block = body.added_up(block, axis, name)
    return block


def _dot(body: Body, node: Node, indices: Indices, name: str) -> Block:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    axis = _inner_axis(indices, shapes[0][-1])
    operands = [
        body.read(operand, (*_stretched(indices, shape[:-1]), _along(axis)))
        for operand, shape in zip(node.operands, shapes, strict=True)
    ]
    product = body.compute("{0} * {1}", *operands, name=f"{name}_terms")
    return _added_up(body, product, [axis], name)


def _matmul(body: Body, node: Node, indices: Indices, name: str) -> Block:
    vector, matrix = node.operands
    batch = body.nodes[vector].shape[:-1]
    *heads, _, _ = body.nodes[matrix].shape
    axis = _inner_axis(indices, body.nodes[vector].shape[-1])
    left = body.read(vector, (*_stretched(indices, batch), _along(axis)))
    ends = (_along(axis), indices[-1])
    if node["transposed"]:
        ends = ends[::-1]
    right = body.read(matrix, (*_stretched(indices, tuple(heads)), *ends))
    product = body.compute("{0} * {1}", left, right, name=f"{name}_terms")
    return _added_up(body, product, [axis], name)


def _outer(body: Body, node: Node, indices: Indices, name: str) -> Block:
    shapes = [body.nodes[operand].shape for operand in node.operands]
    heads = node["heads"]
    lengths = broadcast(shapes[0][:-1], shapes[1][:-1])[heads:]
    axes = [_inner_axis(indices, length, further) for further, length in enumerate(lengths)]
    batch = (*indices[:heads], *map(_along, axes))
    left, right = (
        body.read(operand, (*_stretched(batch, shape[:-1]), index))
        for operand, shape, index in zip(node.operands, shapes, indices[-2:], strict=True)
    )
    product = body.compute("{0} * {1}", left, right, name=f"{name}_terms")
    return _added_up(body, product, axes, name)


def _expand(body: Body, node: Node, indices: Indices, name: str) -> Block:
    (operand,) = node.operands
    return body.read(operand, _stretched(indices, body.nodes[operand].shape))


def _total(body: Body, node: Node, indices: Indices, name: str) -> Block:
    (operand,) = node.operands
    shape = body.nodes[operand].shape
    axes = {
        place: _inner_axis(indices, shape[place], further)
        for further, place in enumerate(node["axes"])
    }
    read = tuple(
        _along(axes[place]) if place in axes else index for place, index in enumerate(indices)
    )
    return _added_up(body, body.read(operand, read), list(axes.values()), name)


def _concat(body: Body, node: Node, indices: Indices, name: str) -> Block:
    place = node["axis"]
    index, begin = indices[place], 0
    found: Block | None = None
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


def _slice(body: Body, node: Node, indices: Indices, name: str) -> Block:
    place = node["axis"]
    index = indices[place].plus(node["begin"])
    return body.read(node.operands[0], (*indices[:place], index, *indices[place + 1 :]))


def _pad(body: Body, node: Node, indices: Indices, name: str) -> Block:
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
