"""The intermediate representation: immutable programs in static single assignment form.

A program is a tuple of nodes in which each refers to earlier ones by position. A node has one
operator, a space that says what its rows stand for, and the shape of one row. Programs are plain
data: two that are built the same way compare and hash equal, and a pass is a function from one to
another. Row shapes line up from the left, as rows do: a scalar per head `(heads,)` scales a vector
per head `(heads, features)` without further ado.

Operators (`x`, `y` are operands; shapes are of one row):

| operator | meaning |
|---|---|
| input | argument `name` |
| inverse_count | 1 / number of rows that `map` sends here |
| gather | read `x` along `map` |
| sum | add `x` up along `map` |
| softmax | softmax of `x` over the rows that `map` sends to one target |
| add sub mul div | elementwise |
| scale shift | `x * value`, `x + value` |
| reciprocal exp log tanh sigmoid relu leaky_relu | elementwise; slope `value` |
| relu_gradient | the gradient `x` of relu where its result `y` is not 0, else 0 |
| leaky_relu_slope | derivative of leaky_relu: 1 where `x > 0`, else `value` |
| dot | contract the last axes: (..., d), (..., d) to (...) |
| matmul | (..., k) times (*heads, k, n) to (..., n); with `transposed` (..., n) to (..., k) |
| outer | (..., k), (..., n) to (*heads, k, n): the transpose of matmul in its matrix |
| reshape expand total | `shape`; broadcast to `shape`; sum over `axes`, which stay with size 1 |
| concat slice pad | along axis `axis`; slice [begin, end); pad with zeros to `size` at `begin` |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.rgnn import spaces
from penstock.rgnn.spaces import Coordinate, RowMap, Space

Shape = tuple[int, ...]

BINARY = frozenset({"add", "sub", "mul", "div", "relu_gradient"})
UNARY = frozenset({"scale", "shift", "reciprocal", "exp", "log", "tanh", "sigmoid", "relu"})
UNARY |= {"leaky_relu", "leaky_relu_slope"}
LEAVES = frozenset({"input", "inverse_count"})
MOVES = frozenset({"gather", "sum", "softmax"})  # rows of the result need other rows of an operand
RESHAPES = frozenset({"reshape", "expand", "total", "concat", "slice", "pad"})
PRODUCTS = frozenset({"dot", "matmul", "outer"})
ROWWISE = BINARY | UNARY | RESHAPES | PRODUCTS
OPERATORS = LEAVES | MOVES | ROWWISE
READS = frozenset({"gather", "reshape"})
"""Operators that compute nothing: they say how a value in memory is read."""

TYPES = (Space.RELATION, Space.NODE_TYPE, Space.ONE)
"""Spaces of few rows, each of which many rows of others are sent to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One value: its operator, its space, the shape of a row."""

    op: str
    operands: tuple[int, ...]
    space: Space
    shape: Shape
    attributes: tuple[tuple[str, Any], ...] = ()
    where: str = dataclasses.field(default="", compare=False)
    """The user's line that asked for it."""

    def __getitem__(self, name: str) -> Any:
        for known, value in self.attributes:
            if known == name:
                return value
        raise KeyError(name)

    @property
    def map(self) -> RowMap:
        """The map of a gather, sum, softmax or inverse_count."""
        return self["map"]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Nodes in an order in which they can be computed, and the outputs among them."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def inputs(self) -> dict[str, int]:
        """Return the position of each input, by name."""
        return {node["name"]: i for i, node in enumerate(self.nodes) if node.op == "input"}

    def __str__(self) -> str:
        lines = [f"%{i} = {describe(node)}" for i, node in enumerate(self.nodes)]
        outputs = ", ".join(f"%{i}" for i in self.outputs)
        return "\n".join([*lines, f"return {outputs}"])


def describe(node: Node) -> str:
    """Return a node on one line, as `str(program)` has it."""
    parts = [f"%{operand}" for operand in node.operands]
    parts += [f"{name}={value}" for name, value in node.attributes]
    return f"{node.op}({', '.join(parts)})  # {node.space.value} {list(node.shape)}"


def describe_read(program: Program, position: int, *, has_names: bool = True) -> str:
    """Return how an expression reads a value: `x[src]` for a gather of an input, `%3` for a value.

    Without `has_names` inputs are numbered as well.
    """

    def say(at: int) -> str:
        node = program.nodes[at]
        if node.op == "gather":
            return f"{say(node.operands[0])}[{node.map.name}]"
        if node.op == "reshape":
            return f"{say(node.operands[0])}.reshape{node.shape}"
        if node.op == "inverse_count":
            return f"inverse_count({node.map.name})"
        if node.op == "outer":
            return f"outer({', '.join(say(operand) for operand in node.operands)})"
        return node["name"] if node.op == "input" and has_names else f"%{at}"

    return say(position)


class ProgramBuilder:
    """A builder of programs: it infers and checks shapes, and keeps typed weights small.

    A rowwise operator on operands that are all read along one map from types (of edges or nodes)
    is computed once per type and then read along that map. So a product of weights of one relation
    has a row per relation wherever it is written, and no matrix per edge is ever formed.

    Args:
        share: Whether to reuse an equal node instead of adding another one.
    """

    def __init__(self, *, share: bool = False) -> None:
        self.nodes: list[Node] = []
        self.where = ""
        self._known: dict[Node, int] | None = {} if share else None

    def input(self, name: str, space: Space, shape: Shape) -> int:
        """Append an argument of the program."""
        return self._append(Node("input", (), space, shape, (("name", name),), self.where))

    def add(self, op: str, *operands: int, **attributes: Any) -> int:
        """Append an operator on earlier values; return the position of its result."""
        assert op in OPERATORS, op
        if op == "gather":
            (read,), row_map = operands, attributes["map"]
            if row_map == spaces.identity(row_map.rows):
                return read
            if self.nodes[read].op == "gather" and self.nodes[read].map.into is Space.ONE:
                (single,) = self.nodes[read].operands
                return self.add("gather", single, map=spaces.to_one(row_map.rows))
        if op in ROWWISE:
            row_map = self.find_type_map(operands)
            if row_map is not None:
                moved = [self.read(operand, row_map) for operand in operands]
                assert None not in moved
                return self.add("gather", self.add(op, *moved, **attributes), map=row_map)  # pyright: ignore[reportArgumentType]
        nodes = [self.nodes[operand] for operand in operands]
        space = self._space(op, nodes, attributes)
        shape = infer_shape(op, [node.shape for node in nodes], attributes)
        if op in ("outer", "matmul") and len(shape) > 3:
            raise ValueError(f"{op} of rows of shape {[list(node.shape) for node in nodes]}")
        if attributes.get("value") == 0:  # 0.0 equals -0.0
            attributes["sign"] = math.copysign(1, attributes["value"])
        ordered = tuple(sorted(attributes.items()))
        return self._append(Node(op, operands, space, shape, ordered, self.where))

    def read(self, position: int, through: RowMap) -> int | None:
        """Return the value that becomes the one at `position` by a gather along `through`.

        It is for what is itself read along a map that `through` comes before, and for what is
        already in the space that `through` leads to.
        """
        node = self.nodes[position]
        if node.space is through.into and node.space is not through.rows:
            return position
        if node.op != "gather" or node.map.rows is not through.rows:
            return None
        rest = spaces.factor(node.map, through)
        if rest is None:
            return None
        return self.add("gather", node.operands[0], map=rest)

    def program(self, outputs: Iterable[int]) -> Program:
        """Return the program of the values that `outputs` need; inputs all stay."""
        outputs = tuple(outputs)
        inputs = {i for i, node in enumerate(self.nodes) if node.op == "input"}
        kept = inputs | find_dependencies(self.nodes, outputs)
        place = {old: new for new, old in enumerate(sorted(kept))}
        nodes = tuple(_move(self.nodes[old], place) for old in place)
        return Program(nodes, tuple(place[output] for output in outputs))

    def copy(self, node: Node, operands: Sequence[int]) -> int:
        """Append a node of another program with new operands."""
        self.where = node.where
        if node.op == "input":
            return self.input(node["name"], node.space, node.shape)
        return self.add(node.op, *operands, **dict(node.attributes))

    def _append(self, node: Node) -> int:
        if self._known is not None and node in self._known:
            return self._known[node]
        self.nodes.append(node)
        position = len(self.nodes) - 1
        if self._known is not None:
            self._known[node] = position
        return position

    def find_type_map(self, operands: Sequence[int]) -> RowMap | None:
        """Return the one map into types (or the single row) along which every operand is read."""
        nodes = [self.nodes[operand] for operand in operands]
        if not nodes or any(node.op != "gather" for node in nodes):
            return None
        maps = {node.map for node in nodes if node.map.into is not Space.ONE}
        if not maps:
            return nodes[0].map
        row_map = next(iter(maps))
        is_of_types = row_map.into in (Space.RELATION, Space.NODE_TYPE)
        return row_map if len(maps) == 1 and is_of_types else None

    @staticmethod
    def _space(op: str, nodes: list[Node], attributes: dict[str, Any]) -> Space:
        if op == "gather":
            row_map = attributes["map"]
            assert nodes[0].space is row_map.into, (nodes[0], row_map)
            return row_map.rows
        if op == "sum":
            assert nodes[0].space is attributes["map"].rows, (nodes[0], attributes["map"])
            return attributes["map"].into
        if op == "inverse_count":
            return attributes["map"].into
        of_operands = {node.space for node in nodes}
        assert len(of_operands) == 1, (op, of_operands)
        return of_operands.pop()


def _move(node: Node, place: dict[int, int]) -> Node:
    """Return a node on operands that have new positions; itself where they are the old ones."""
    operands = tuple(place[operand] for operand in node.operands)
    if operands == node.operands:
        return node
    return Node(node.op, operands, node.space, node.shape, node.attributes, node.where)


def infer_shape(op: str, shapes: list[Shape], attributes: dict[str, Any]) -> Shape:
    """Return the row shape of an operator's result."""
    if op in BINARY:
        return broadcast(*shapes)
    if op == "inverse_count":
        return ()
    if op == "dot":
        left, right = shapes
        if not left or len(left) != len(right) or left[-1] != right[-1]:
            raise ValueError(f"dot needs two vectors of one length; got {_show(left, right)}")
        return broadcast(left[:-1], right[:-1])
    if op == "matmul":
        return _matmul_shape(*shapes, transposed=attributes["transposed"])
    if op == "outer":
        left, right = shapes
        heads = broadcast(left[:-1], right[:-1])[: attributes["heads"]]
        return (*heads, left[-1], right[-1])
    if op in ("reshape", "expand"):
        shape = tuple(attributes["shape"])
        fits = (
            math.prod(shape) == math.prod(shapes[0])
            if op == "reshape"
            else len(shape) == len(shapes[0]) and broadcast(shape, shapes[0]) == shape
        )
        if not fits:
            raise ValueError(f"rows of shape {_show(shapes[0])} cannot become {_show(shape)}")
        return shape
    if op == "total":
        axes = attributes["axes"]
        return tuple(1 if axis in axes else length for axis, length in enumerate(shapes[0]))
    if op in ("concat", "slice", "pad"):
        return _joined_shape(op, shapes, attributes)
    return shapes[0]


def broadcast(left: Shape, right: Shape) -> Shape:
    """Return the common shape of two row shapes, lined up from the left; sizes of 1 stretch.

    Example:
        >>> broadcast((4,), (4, 16))
        (4, 16)
    """
    if left == right:
        return left
    length = max(len(left), len(right))
    padded = [shape + (1,) * (length - len(shape)) for shape in (left, right)]
    for one, other in zip(*padded, strict=True):
        if one != other and 1 not in (one, other):
            raise ValueError(f"rows of shapes {_show(left, right)} do not line up from the left")
    return tuple(other if one == 1 else one for one, other in zip(*padded, strict=True))


def find_dependencies(nodes: Sequence[Node], outputs: Iterable[int]) -> frozenset[int]:
    """Return the positions that some outputs are computed from, the outputs included."""
    found = set(outputs)
    for position in range(len(nodes) - 1, -1, -1):
        if position in found:
            found.update(nodes[position].operands)
    return frozenset(found)


def find_source(program: Program, position: int) -> int:
    """Return the value that a chain of gathers and reshapes reads."""
    while program.nodes[position].op in READS:
        position = program.nodes[position].operands[0]
    return position


def find_maps(program: Program, position: int) -> tuple[RowMap, ...]:
    """Return the gathers from a value to what it reads; none for a value of the same row."""
    maps: tuple[RowMap, ...] = ()
    while program.nodes[position].op in READS:
        if program.nodes[position].op == "gather":
            maps = (*maps, program.nodes[position].map)
        position = program.nodes[position].operands[0]
    return maps


def find_coordinates(program: Program) -> tuple[frozenset[Coordinate], ...]:
    """Return, for each node, the coordinates of its row that its value depends on."""
    found: list[frozenset[Coordinate]] = []
    for node in program.nodes:
        if node.op in ROWWISE:
            found.append(frozenset().union(*(found[operand] for operand in node.operands)))
        elif node.op == "gather":
            # Of what the map tells apart, nothing if the value read is the same everywhere.
            read = found[node.operands[0]]
            found.append(spaces.coordinates(node.map) if read else read)
        else:  # an input, a sum, a softmax: one value for each row
            found.append(spaces.coordinates(spaces.identity(node.space)))
    return tuple(found)


def _matmul_shape(left: Shape, right: Shape, *, transposed: bool) -> Shape:
    if len(right) < 2:
        raise ValueError(f"@ needs a matrix on its right; got rows of shape {_show(right)}")
    *heads, rows, columns = right
    if transposed:
        rows, columns = columns, rows
    if not left or left[-1] != rows:
        raise ValueError(f"@ of rows of shapes {_show(left, right)}: {_show(left)} is no row of it")
    batch = left[:-1]
    if len(heads) > len(batch) or any(
        of_left not in (1, of_right) for of_left, of_right in zip(batch, heads, strict=False)
    ):
        raise ValueError(f"@ of rows of shapes {_show(left, right)}: the heads differ")
    return (*broadcast(batch, tuple(heads)), columns)


def _joined_shape(op: str, shapes: list[Shape], attributes: dict[str, Any]) -> Shape:
    axis = attributes["axis"]
    lengths = [shape[axis] for shape in shapes]
    others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if len(others) != 1:
        raise ValueError(f"concat of rows of shapes {_show(*shapes)}: only the last may differ")
    if op == "slice":
        assert 0 <= attributes["begin"] <= attributes["end"] <= lengths[0], (attributes, shapes)
        length = attributes["end"] - attributes["begin"]
    else:
        length = sum(lengths) if op == "concat" else attributes["size"]
    return (*shapes[0][:axis], length, *shapes[0][axis + 1 :])


def _show(*shapes: Shape) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
