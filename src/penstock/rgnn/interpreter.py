"""The meaning of a program, one plain torch expression per operator.

This is the oracle: nothing is fused, nothing is compact, every gather makes its rows. A weight per
edge is as large as it sounds, so use it on small graphs.

Row tensors have shape (rows, *row shape); a value of `Space.ONE` has one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import Node, Program
from penstock.rgnn.spaces import RowMap, Space

SumRows = Callable[[torch.Tensor, Graph, RowMap], torch.Tensor]


def interpret(
    program: Program, graph: Graph, arguments: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run a program operator by operator, on tensors as the user has them, by input.

    It is differentiable by autograd.
    """
    dtype = next((each.dtype for each in arguments.values()), torch.get_default_dtype())
    wide = wide_dtype(dtype)
    values: list[torch.Tensor] = []
    for node in program.nodes:
        if node.op == "input":
            value = enter(graph, node.space, arguments[node["name"]].to(wide))
        elif node.op == "inverse_count":
            value = inverse_count(graph, node.map, wide)
        else:
            operands = [values[operand] for operand in node.operands]
            value = apply(node, operands, graph)
        values.append(value)
    return tuple(
        leave(graph, program.nodes[out].space, values[out]).to(dtype) for out in program.outputs
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that numbers of `dtype` are added up in; in a narrower one sums stall."""
    return torch.promote_types(dtype, torch.float32)


def enter(graph: Graph, space: Space, argument: torch.Tensor) -> torch.Tensor:
    """Return an argument as rows: edges in the internal order, an untyped weight as one row."""
    if space is Space.EDGE:
        return argument.index_select(0, graph.edge_order)
    return argument.unsqueeze(0) if space is Space.ONE else argument


def leave(graph: Graph, space: Space, value: torch.Tensor) -> torch.Tensor:
    """Return rows as the user has them: the inverse of `enter`."""
    if space is Space.EDGE:
        return torch.empty_like(value).index_copy(0, graph.edge_order.long(), value)
    return value.squeeze(0) if space is Space.ONE else value


def inverse_count(graph: Graph, row_map: RowMap, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 / number of rows of each target; 1, which is never read, for one without rows."""
    return graph.group_sizes(row_map).clamp(min=1).to(dtype).reciprocal()


def apply(node: Node, operands: Sequence[torch.Tensor], graph: Graph) -> torch.Tensor:
    """Apply one operator to row tensors."""
    if node.op == "gather":
        return operands[0].index_select(0, graph.index(node.map))
    if node.op == "sum":
        return sum_rows(operands[0], graph, node.map)
    if node.op == "softmax":
        return softmax(operands[0], graph, node.map)
    return ROWWISE[node.op](node, *operands)


def sum_rows(rows: torch.Tensor, graph: Graph, row_map: RowMap) -> torch.Tensor:
    """Add rows up by where `row_map` sends them, in ascending order of the rows."""
    if row_map.into is Space.ONE:
        return rows.sum(0, keepdim=True)
    total = rows.new_zeros(graph.counts.rows(row_map.into), *rows.shape[1:])
    return total.index_add(0, graph.index(row_map), rows)


def softmax(
    scores: torch.Tensor, graph: Graph, row_map: RowMap, add_up: SumRows = sum_rows
) -> torch.Tensor:
    """Compute y_i = exp(s_i - m) / sum of exp(s_j - m) over the rows j of a target, m = max s_j."""
    index = graph.index(row_map)
    num_targets = graph.counts.rows(row_map.into)
    largest = scores.new_full((num_targets, *scores.shape[1:]), -torch.inf)
    wide = index.long().reshape(-1, *(1,) * (scores.dim() - 1)).expand_as(scores)
    # The result does not depend on what is taken off, so no gradient flows through it.
    largest = largest.scatter_reduce(0, wide, scores.detach(), "amax")
    powers = (scores - largest.index_select(0, index)).exp()
    return powers / add_up(powers, graph, row_map).index_select(0, index)


def align(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two row tensors with as many axes; missing ones are added at the right."""
    dims = max(left.dim(), right.dim())
    return (
        left.reshape(*left.shape, *(1,) * (dims - left.dim())),
        right.reshape(*right.shape, *(1,) * (dims - right.dim())),
    )


def matmul(vector: torch.Tensor, matrix: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Multiply (rows, *batch, k) by (rows, *heads, k, n), heads lined up from the left."""
    if transposed:
        matrix = matrix.transpose(-1, -2)
    num_missing = (vector.dim() - 1) - (matrix.dim() - 2)
    if num_missing == 0:
        return (vector.unsqueeze(-2) @ matrix).squeeze(-2)
    assert num_missing == 1, (vector.shape, matrix.shape)
    return vector @ matrix


def outer(left: torch.Tensor, right: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Compute outer products (rows, *heads, k, n), summed over the batch axes past the heads."""
    product = left.unsqueeze(-1) * right.unsqueeze(-2)
    rest = tuple(range(1 + heads, product.dim() - 2))
    return product.sum(rest) if rest else product


def _binary(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    return lambda _, left, right: combine(*align(left, right))


def _pad(node: Node, rows: torch.Tensor) -> torch.Tensor:
    axis = 1 + node["axis"]
    after = node["size"] - node["begin"] - rows.shape[axis]
    behind = (0, 0) * (rows.dim() - 1 - axis)  # torch has the last axis first
    return torch.nn.functional.pad(rows, (*behind, node["begin"], after))


ROWWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "scale": lambda node, x: x * node["value"],
    "shift": lambda node, x: x + node["value"],
    "reciprocal": lambda _, x: x.reciprocal(),
    "exp": lambda _, x: x.exp(),
    "log": lambda _, x: x.log(),
    "tanh": lambda _, x: x.tanh(),
    "sigmoid": lambda _, x: x.sigmoid(),
    # Not x * 0, which is NaN for -inf and -0.0 for what is negative; NaN stays.
    "relu": lambda _, x: torch.where(x <= 0, 0.0, x),
    "relu_gradient": _binary(lambda g, y: torch.where(y <= 0, 0.0, g)),
    "leaky_relu": lambda node, x: torch.where(x > 0, x, x * node["value"]),
    "leaky_relu_slope": lambda node, x: torch.where(
        x > 0, x.new_ones(()), x.new_full((), node["value"])
    ),
    "dot": lambda _, x, y: (x * y).sum(-1),
    "matmul": lambda node, x, w: matmul(x, w, transposed=node["transposed"]),
    "outer": lambda node, x, y: outer(x, y, heads=node["heads"]),
    "reshape": lambda node, x: x.reshape(x.shape[0], *node["shape"]),
    "expand": lambda node, x: x.expand(x.shape[0], *node["shape"]),
    "total": lambda node, x: x.sum([1 + axis for axis in node["axes"]], keepdim=True),
    "concat": lambda node, *xs: torch.cat(xs, dim=1 + node["axis"]),
    "slice": lambda node, x: x.narrow(1 + node["axis"], node["begin"], node["end"] - node["begin"]),
    "pad": _pad,
}
"""The operators that take each row by itself: a node and its operands to the result."""
