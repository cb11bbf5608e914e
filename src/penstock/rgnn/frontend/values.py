"""The language while a function is traced: a graph, and values without numbers.

An argument has no rows until it is indexed: `e.src(x)` makes it a node tensor, `W[e.type]` one
matrix per relation. An argument that is used as it is (a bias) is the same for every row. What is
done to arguments before they are indexed is kept back and done to what they are indexed to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from penstock.rgnn import spaces
from penstock.rgnn.frontend.errors import TraceError, describe_user_line
from penstock.rgnn.ir import Node, ProgramBuilder, Shape
from penstock.rgnn.spaces import RowMap, Space
from penstock.units import parse_count


class Trace:
    """A run of a user's function: the program so far, and the spaces of its arguments."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.builder = ProgramBuilder()
        self.whole_weights: list[tuple[str, int, str]] = []
        """Matrices for heads that the vector did not have: name, number of heads, line."""
        self._shapes = shapes  # of tensor arguments, all axes
        self._bound: dict[str, tuple[Space, int]] = {}

    def bind(self, name: str, space: Space) -> int:
        """Return the input node of an argument that has rows of `space`."""
        if name in self._bound:
            known, position = self._bound[name]
            if known is not space:
                raise TraceError(
                    f"argument {name!r} is used with rows of {known.value!r} and of "
                    f"{space.value!r}; pass it as two arguments if both are meant"
                )
            return position
        shape = self._shapes[name]
        if space is not Space.ONE and not shape:
            raise TraceError(f"argument {name!r} is a single number and has no rows to index")
        # The number of rows may be unknown (symbolic), which it must not be where it is used.
        whole = tuple(int(length) for length in shape) if space is Space.ONE else shape[1:]
        position = self.builder.input(name, space, whole)
        self._bound[name] = (space, position)
        return position

    def add(self, op: str, *operands: int, **attributes: Any) -> int:
        """Append an operator for the user's line."""
        self.builder.where = describe_user_line()
        try:
            return self.builder.add(op, *operands, **attributes)
        except ValueError as error:
            raise TraceError(str(error)) from None


def _binary(op: str) -> tuple[Any, Any]:
    """Return the methods of an operator with the value on its left, and on its right."""
    return (
        lambda self, other: apply_elementwise(op, self, other),
        lambda self, other: apply_elementwise(op, other, self),
    )


def _refuse(message: str) -> Any:
    """Return the method of an operator that there is not."""

    def refuse(self: object, *args: object) -> NoReturn:
        raise TraceError(message)

    return refuse


class _Operand:
    """The operators of values and arguments, and the errors of those that there are not."""

    trace: Trace
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    __truediv__, __rtruediv__ = _binary("div")

    def __neg__(self) -> Any:
        return apply_elementwise("mul", self, -1.0)

    def __matmul__(self, other: Any) -> Any:
        assert isinstance(self, Argument | Value)
        return matmul(self, other)

    __pow__ = __rpow__ = _refuse(
        "traced values have no power; write v * v, or exp(p * log(v)) of positive numbers"
    )
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __and__ = __rand__ = __or__ = __ror__ = (
        _refuse("traced values have the operators + - * / @ and unary -")
    )
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __mod__
    __invert__ = __pos__ = __round__ = __mod__
    __abs__ = _refuse("traced values have no absolute value; write relu(v) + relu(-v)")
    __bool__ = _refuse(
        "the branch depends on a tensor's values, which are not known when the function is "
        "compiled; use elementwise operators, or branch on a plain Python argument"
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__
    __float__ = __int__ = __index__ = _refuse(
        "a traced value is no plain number; use the functions of penstock.rgnn for math's"
    )
    __iter__ = _refuse("a traced value cannot be iterated over; its rows are not known yet")
    __len__ = _refuse("a traced value has no length; the number of rows is not known yet")
    __setitem__ = _refuse("values are immutable; write a new one instead of assigning into one")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols probe for these
            raise AttributeError(name)
        raise TraceError(
            f"a traced value has no {name!r}; see penstock.rgnn for the operators there are"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        raise TraceError(
            f"torch's {name} does not work on traced values; use the operator of that name in "
            f"penstock.rgnn if there is one, or apply torch's outside the compiled function"
        )


class Argument(_Operand):
    """A tensor argument, or arithmetic on such, that has not been indexed yet."""

    def __init__(self, trace: Trace, name: str, bind: Callable[[Space], int]) -> None:
        self.trace = trace
        self.name = name
        self.bind = bind

    def __getitem__(self, index: Any) -> Value:
        if not isinstance(index, TypeIndex):
            name = getattr(index, "__name__", "")
            meant = f"{self.name}[g.edges.type], {self.name}[g.nodes.type]"
            if name in ("src", "dst"):
                index, meant = f"g.edges.{name}", f"{meant}, or read: g.edges.{name}({self.name})"
            raise TraceError(
                f"{self.name!r} is indexed with {index!r}; arguments are indexed with the types of "
                f"a graph's edges or nodes: {meant}"
            )
        position = self.bind(index.map.into)
        return Value(self.trace, self.trace.add("gather", position, map=index.map))

    def __repr__(self) -> str:
        return f"argument {self.name!r}"

    def broadcast(self, space: Space) -> Value:
        """Return the argument as it is, the same in every row."""
        position = self.bind(Space.ONE)
        return Value(self.trace, self.trace.add("gather", position, map=spaces.to_one(space)))


class Value(_Operand):
    """A value with rows: of edges or of nodes."""

    def __init__(self, trace: Trace, position: int) -> None:
        self.trace = trace
        self.position = position

    @property
    def node(self) -> Node:
        """The node that computes the value."""
        return self.trace.builder.nodes[self.position]

    @property
    def shape(self) -> Shape:
        """Shape of one row: `()`, `(features,)`, `(heads,)` or `(heads, features)`."""
        return self.node.shape

    def heads(self, num_heads: int) -> Value:
        """Split the features into heads: rows (heads * d,) become (heads, d)."""
        num_heads = parse_count(num_heads, name="num_heads", least=1)
        if len(self.shape) != 1 or self.shape[0] % num_heads:
            raise TraceError(
                f"rows of shape {list(self.shape)} do not split into {num_heads} heads"
            )
        return self._reshape(num_heads, self.shape[0] // num_heads)

    def merge_heads(self) -> Value:
        """Put the heads one after another: rows (heads, d) become (heads * d,)."""
        if len(self.shape) != 2:
            raise TraceError(f"rows of shape {list(self.shape)} have no heads to merge")
        return self._reshape(self.shape[0] * self.shape[1])

    def sum_heads(self) -> Value:
        """Sum over the heads: rows (heads, d) become (d,)."""
        if len(self.shape) != 2:
            raise TraceError(f"rows of shape {list(self.shape)} have no heads to add up")
        total = Value(self.trace, self.trace.add("total", self.position, axes=(0,)))
        return total._reshape(self.shape[1])

    def mean_heads(self) -> Value:
        """Take the mean over the heads: rows (heads, d) become (d,)."""
        return self.sum_heads() * (1 / max(self.shape[0], 1))

    def __getitem__(self, features: Any) -> Value:
        if not isinstance(features, slice) or features.step not in (None, 1) or not self.shape:
            raise TraceError("of a value only a range of features can be taken: v[begin:end]")
        begin, end, _ = features.indices(self.shape[-1])
        axis = len(self.shape) - 1
        sliced = self.trace.add("slice", self.position, axis=axis, begin=begin, end=max(begin, end))
        return Value(self.trace, sliced)

    def _reshape(self, *shape: int) -> Value:
        return Value(self.trace, self.trace.add("reshape", self.position, shape=shape))

    def __repr__(self) -> str:
        return f"Value({self.node.space.value}, rows of shape {list(self.shape)})"


class _GraphPart:
    """The graph or a part of it: it has attributes, and nothing can be computed with it."""

    _name: ClassVar[str]
    _has: ClassVar[str]

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __repr__(self) -> str:
        return self._name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols probe for these
            raise AttributeError(name)
        raise TraceError(f"{self!r} has no {name!r}; it has {self._has}")

    def __add__(self, other: object) -> NoReturn:
        raise TraceError(f"nothing can be computed with {self!r}; it has {self._has}")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
    __matmul__ = __rmatmul__ = __mod__ = __pow__ = __floordiv__ = __getitem__ = __add__
    __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __len__ = __int__ = __float__ = __index__ = (
        lambda self, *_: self + None
    )


class TypeIndex(_GraphPart):
    """`e.type` or `n.type`: what typed weights are indexed with."""

    _has = "no numbers while a function is traced: index a typed weight with it, W[g.edges.type]"

    def __init__(self, trace: Trace, row_map: RowMap) -> None:
        super().__init__(trace)
        self.map = row_map

    def __repr__(self) -> str:
        return "g.edges.type" if self.map == spaces.EDGE_TYPE else "g.nodes.type"


class Edges(_GraphPart):
    """`g.edges`: read values at an edge's ends, or of the edge itself."""

    _name = "g.edges"
    _has = "g.edges.src(x), g.edges.dst(x), g.edges.type, and g.edges(x) for a row of each edge"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.type = TypeIndex(trace, spaces.EDGE_TYPE)

    def src(self, x: Argument | Value) -> Value:
        """Read `x` at the source of each edge; `x` has a row per node."""
        return self._read_end(x, spaces.EDGE_SRC, "src")

    def dst(self, x: Argument | Value) -> Value:
        """Read `x` at the destination of each edge; `x` has a row per node."""
        return self._read_end(x, spaces.EDGE_DST, "dst")

    def __call__(self, features: Argument) -> Value:
        """Read an argument with a row per edge, in the order in which the graph was given."""
        return _read_rows(self._trace, features, Space.EDGE)

    def _read_end(self, x: Argument | Value, row_map: RowMap, name: str) -> Value:
        position = _read_rows(self._trace, x, Space.NODE, f"g.edges.{name}").position
        return Value(self._trace, self._trace.add("gather", position, map=row_map))


class Nodes(_GraphPart):
    """`g.nodes`: node tensors by themselves."""

    _name = "g.nodes"
    _has = "g.nodes.type, and g.nodes(x) for a row of each node"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.type = TypeIndex(trace, spaces.NODE_TYPE_OF)

    def __call__(self, x: Argument) -> Value:
        """Read an argument with a row per node."""
        return _read_rows(self._trace, x, Space.NODE)


class TracedGraph(_GraphPart):
    """The graph as a user's function sees it."""

    _name = "the graph"
    _has = "edges, nodes, sum_to_dst(v) and sum_to_src(v)"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.edges = Edges(trace)
        self.nodes = Nodes(trace)

    def sum_to_dst(self, v: Value) -> Value:
        """Sum over the edges that end in each node; nodes without such edges get 0."""
        return self._sum(v, spaces.EDGE_DST, "sum_to_dst")

    def sum_to_src(self, v: Value) -> Value:
        """Sum over the edges that begin in each node; nodes without such edges get 0."""
        return self._sum(v, spaces.EDGE_SRC, "sum_to_src")

    def _sum(self, v: Value, row_map: RowMap, name: str) -> Value:
        value = require_rows(v, Space.EDGE, name)
        return Value(self._trace, self._trace.add("sum", value.position, map=row_map))


def require_rows(v: Any, space: Space, what: str) -> Value:
    """Return `v` if it is a value with rows of `space`, else raise an error."""
    if not isinstance(v, Value) or v.node.space is not space:
        found = f"a value of {v.node.space.value}s" if isinstance(v, Value) else describe_operand(v)
        if isinstance(v, Argument):
            parts = ("edges.src", "edges") if space is Space.EDGE else ("nodes",)
            found += "; say which rows it has: " + " or ".join(f"g.{p}({v.name})" for p in parts)
        raise TraceError(f"{what} needs a value of {space.value}s; got {found}")
    return v


def apply_elementwise(op: str, left: Any, right: Any) -> Any:
    """Apply a binary operator to values, arguments and plain numbers."""
    if isinstance(left, int | float) and not isinstance(left, bool):
        if op == "sub":  # n - x is -x + n, and n / x is 1 / x * n
            op, right = "add", apply_unary("scale", right, value=-1.0)
        elif op == "div":
            op, right = "mul", apply_unary("reciprocal", right)
        left, right = right, left
    if isinstance(right, int | float) and not isinstance(right, bool):
        number = float(right)
        if op in ("add", "sub"):
            return apply_unary("shift", left, value=number if op == "add" else -number)
        if op == "div" and number == 0:
            raise TraceError("division by zero")
        return apply_unary("scale", left, value=number if op == "mul" else 1 / number)
    operands = align_rows(op, left, right)
    if isinstance(operands, Argument):
        return operands
    return apply(op, *operands)


def apply(op: str, *values: Value, **attributes: Any) -> Value:
    """Apply an operator to values that have the same rows."""
    trace = values[0].trace
    positions = [value.position for value in values]
    result = Value(trace, trace.add(op, *positions, **attributes))
    if op != "matmul" and len(result.shape) > 2 and result.node.op != "gather":
        raise TraceError(
            f"{op} would make a matrix for each {result.node.space.value}; "
            f"apply it to the vector that the matrix is multiplied with"
        )
    return result


def apply_unary(op: str, x: Any, **attributes: Any) -> Any:
    """Apply an elementwise operator to a value; on an argument it is deferred."""
    if isinstance(x, Argument):
        trace = x.trace
        return Argument(trace, x.name, lambda space: trace.add(op, x.bind(space), **attributes))
    if not isinstance(x, Value):
        raise TraceError(
            f"{op} needs a value or an argument of the function; got {describe_operand(x)}"
        )
    return apply(op, x, **attributes)


def align_rows(op: str, *operands: Any) -> Argument | list[Value]:
    """Return operands with the same rows; arguments without an index are the same in every row.

    Where no operand has been indexed, the operation is deferred, as another argument.
    """
    for operand in operands:
        if not isinstance(operand, _Operand):
            raise TraceError(
                f"{op} of {describe_operand(operand)}: tensors that a compiled function uses have "
                f"to be passed to it as arguments"
            )
    values = [operand for operand in operands if isinstance(operand, Value)]
    if not values:
        trace = operands[0].trace
        name = f"{op}({', '.join(operand.name for operand in operands)})"
        return Argument(
            trace, name, lambda space: trace.add(op, *(operand.bind(space) for operand in operands))
        )
    of_values = {value.node.space for value in values}
    if len(of_values) > 1:
        found = " and ".join(sorted(f"{space.value}s" for space in of_values))
        raise TraceError(
            f"{op} of values of {found}; read node values at an end of the edges with "
            f"g.edges.src or g.edges.dst"
        )
    space = of_values.pop()
    return [
        operand.broadcast(space) if isinstance(operand, Argument) else operand
        for operand in operands
    ]


def _read_rows(trace: Trace, x: Any, space: Space, what: str = "") -> Value:
    if isinstance(x, Argument):
        return Value(trace, x.bind(space))
    return require_rows(x, space, what or f"g.{space.value}s")


def describe_operand(thing: object) -> str:
    """Describe an operand in an error."""
    if isinstance(thing, _Operand | _GraphPart):
        return repr(thing)
    return f"{type(thing).__name__} {thing!r:.60}"


def matmul(x: Value | Argument, weight: Value | Argument) -> Value:
    """Multiply each row of `x` with the matrix of its type: `x @ weight`.

    Args:
        x: Vectors, rows (k,) or (heads, k).
        weight: `W[g.edges.type]`, `V[g.nodes.type]` or an argument that is the same for all rows;
            one matrix (k, n), or one per head (heads, k, n).

    Returns:
        Rows (n,) or (heads, n).
    """
    if isinstance(x, Argument) and isinstance(weight, Argument):
        raise TraceError(
            f"{x.name} @ {weight.name}: say which rows the left side has, for example "
            f"g.edges.src({x.name}) @ {weight.name}[g.edges.type]"
        )
    operands = align_rows("@", x, weight)
    assert not isinstance(operands, Argument)
    vector, matrix = operands
    node = matrix.node
    if node.op != "gather" or node.map.into not in (Space.RELATION, Space.NODE_TYPE, Space.ONE):
        raise TraceError(
            f"@ needs a weight on its right: W[g.edges.type], V[g.nodes.type] or an argument as it "
            f"is; got a value that differs from {node.space.value} to {node.space.value}"
        )
    if isinstance(weight, Argument) and len(vector.shape) == 1 and len(node.shape) == 3:
        vector.trace.whole_weights.append((weight.name, node.shape[0], describe_user_line()))
    if vector.shape:
        vector = add_heads(vector, len(matrix.shape) - 1)
    if len(matrix.shape) == 3 and matrix.shape[0] == 1:  # of one head, which serves all
        matrix = apply("reshape", matrix, shape=matrix.shape[1:])
    return apply("matmul", vector, matrix, transposed=False)


def add_heads(value: Value, num_axes: int) -> Value:
    """Return vectors without heads as vectors with one, which serves all."""
    if len(value.shape) != 1 or num_axes != 2:
        return value
    return apply("reshape", value, shape=(1, *value.shape))
