"""The functions of the language, beside the operators `+ - * / @` and indexing.

Each works on values of edges or of nodes while a function is traced; none works on tensors.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.rgnn import spaces
from penstock.rgnn.frontend.errors import TraceError
from penstock.rgnn.frontend.values import (
    Argument,
    Value,
    add_heads,
    align_rows,
    apply,
    apply_unary,
    require_rows,
)
from penstock.rgnn.spaces import RowMap, Space

_GROUPS = {"destination": spaces.EDGE_DST, "relation": spaces.EDGE_DST_PAIR}


def exp(x: Value) -> Value:
    """Compute the exponential elementwise. Attention weights overflow less by `edge_softmax`."""
    return apply_unary("exp", x)


def log(x: Value) -> Value:
    """Compute the natural logarithm elementwise."""
    return apply_unary("log", x)


def tanh(x: Value) -> Value:
    """Compute the hyperbolic tangent elementwise."""
    return apply_unary("tanh", x)


def sigmoid(x: Value) -> Value:
    """Compute 1 / (1 + exp(-x)) elementwise."""
    return apply_unary("sigmoid", x)


def relu(x: Value) -> Value:
    """Compute max(x, 0) elementwise."""
    return apply_unary("relu", x)


def leaky_relu(x: Value, negative_slope: float = 0.01) -> Value:
    """Compute `x` where it is positive, else `negative_slope * x`, elementwise."""
    return apply_unary("leaky_relu", x, value=float(negative_slope))


def dot(left: Value, right: Value) -> Value:
    """Compute the inner product over the last axis: rows (heads, d) give (heads,).

    Example:
        >>> s = dot(e.src(x), a[e.type])  # doctest: +SKIP

    Args:
        left: Vectors, one per row or one per row and head.
        right: The same; where only one of them has heads, the other serves them all.
    """
    operands = align_rows("dot", left, right)
    if isinstance(operands, Argument):
        raise TraceError("dot of arguments that have not been indexed, such as a[g.edges.type]")
    num_axes = max(len(value.shape) for value in operands)
    return apply("dot", *(add_heads(value, num_axes) for value in operands))


def combine(coefficients: Value | Argument, bases: Argument) -> Any:
    """Combine bases to weights: W_r = sum of c_rb V_b over the bases b.

    Example:
        >>> z = e.src(x) @ combine(comp, bases)[e.type]  # doctest: +SKIP

    Args:
        coefficients: One per base, shape (num_types, num_bases) before it is indexed.
        bases: Shape (num_bases, *shape), the same for all types.

    Returns:
        A weight with rows of `shape`, to be indexed as `coefficients` would have been.
    """
    if not isinstance(bases, Argument):
        raise TraceError(f"combine needs the bases as an argument of the function; got {bases!r}")
    if not isinstance(coefficients, Argument | Value):
        raise TraceError(
            f"combine needs coefficients that are a value or an argument of the function; got "
            f"{coefficients!r}"
        )
    trace = bases.trace

    def combine_at(position: int) -> int:
        space = trace.builder.nodes[position].space
        base = bases.bind(Space.ONE)
        num_bases, *shape = trace.builder.nodes[base].shape or (0,)
        flat = trace.add("reshape", base, shape=(num_bases, math.prod(shape)))
        everywhere = trace.add("gather", flat, map=spaces.to_one(space))
        product = trace.add("matmul", position, everywhere, transposed=False)
        return trace.add("reshape", product, shape=tuple(shape))

    if isinstance(coefficients, Argument):
        name = f"combine({coefficients.name}, {bases.name})"
        return Argument(trace, name, lambda space: combine_at(coefficients.bind(space)))
    return Value(trace, combine_at(coefficients.position))


def edge_softmax(scores: Value, *, within: str = "destination") -> Value:
    """Normalise scores s_e to exp(s_e) / sum of exp(s_e') over the edges e' into the same node.

    The largest score is taken off before the exponential, so no score is too large.

    Example:
        >>> g.sum_to_dst(edge_softmax(s) * z)  # doctest: +SKIP

    Args:
        scores: A value of edges; each feature (head) by itself.
        within: "destination", or "relation" for a sum of 1 over the edges of each relation into a
            node.
    """
    value = require_rows(scores, Space.EDGE, "edge_softmax")
    return apply("softmax", value, map=_find_group(within))


def edge_mean(v: Value, *, within: str = "relation") -> Value:
    """Scale edge values so that their sum to the destination is a mean.

    Example:
        >>> g.sum_to_dst(edge_mean(e.src(x) @ W[e.type]))  # doctest: +SKIP

    Args:
        v: A value of edges.
        within: "relation" for the mean over the edges of each relation into a node (1 / c_ir in
            the RGCN paper), or "destination" for the mean over all edges into it.
    """
    value = require_rows(v, Space.EDGE, "edge_mean")
    row_map = _find_group(within)
    count = value.trace.add("inverse_count", map=row_map)
    share = Value(value.trace, value.trace.add("gather", count, map=row_map))
    return apply("mul", value, share)


def concat(*values: Value) -> Value:
    """Put the features of several values one after another: rows (a,) and (b,) give (a + b,)."""
    if not values:
        raise TraceError("concat needs values to put one after another; got none")
    operands = align_rows("concat", *values)
    if isinstance(operands, Argument):
        raise TraceError("concat of arguments that have not been indexed, such as g.nodes(x)")
    num_axes = {len(value.shape) for value in operands}
    if num_axes not in ({1}, {2}):
        raise TraceError(
            f"concat of rows of shapes {[list(value.shape) for value in operands]}: all must be "
            f"vectors, or all vectors per head"
        )
    return apply("concat", *operands, axis=num_axes.pop() - 1)


def _find_group(within: str) -> RowMap:
    if within not in _GROUPS:
        raise TraceError(f"within must be one of {sorted(_GROUPS)}; got {within!r}")
    return _GROUPS[within]
