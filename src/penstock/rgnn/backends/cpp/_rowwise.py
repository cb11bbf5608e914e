"""Rowwise operators as C++: expressions if possible, else statements.

A scope is one row of some space inside a loop. It is the way to read the row of any value there: a
pointer into memory, an array of the group's sums, or an expression that is computed on the spot.
Elementwise operators stay expressions until something needs all elements at once, so that a chain
of them becomes one loop over features and its intermediates live in registers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.rgnn.backends.cpp._kernel import KernelTask
from penstock.rgnn.ir import UNARY, Node, Shape, find_maps, find_source
from penstock.rgnn.lowering import is_elementwise
from penstock.rgnn.spaces import RowMap, Space

Subscript = tuple[str, ...]
"""One expression for each axis of a row."""

_STACK_NUMBERS = 4096  # as `kStackNumbers`; a thread's stack may be 2 MiB
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


_MIN_PREFETCHED = 8  # elements of a row: what takes a cache line of its own
_FUNCTIONS = {"exp": "exponential", "log": "logarithm", "tanh": "hyperbolic_tangent"}


class Lines:
    """Source text with indentation."""

    def __init__(self, depth: int = 0) -> None:
        self._lines: list[str] = []
        self._depth = depth

    def add(self, *lines: str) -> None:
        """Append lines at the current depth."""
        self._lines += ["  " * self._depth + line if line else "" for line in lines]

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        """Indent lines between `head` and `tail`."""
        self.add(head)
        self._depth += 1
        yield
        self._depth -= 1
        self.add(tail)

    @contextmanager
    def loops(self, shape: Shape, *, prefix: str = "i", simd: bool = True) -> Iterator[Subscript]:
        """Write a loop over each axis that is longer than 1; yield the subscript."""
        subscript = tuple("0" if n == 1 else f"{prefix}{axis}" for axis, n in enumerate(shape))
        axes = [axis for axis, length in enumerate(shape) if length != 1]
        for axis in axes:
            if simd and axis == axes[-1] and shape[axis] > 3:
                self.add("#pragma omp simd")
            name = subscript[axis]
            self.add(f"for (int64_t {name} = 0; {name} < {shape[axis]}; ++{name})")
            self._depth += 1
        yield subscript
        self._depth -= len(axes)

    def __str__(self) -> str:
        return "\n".join(self._lines)


@dataclasses.dataclass(slots=True)
class Scope:
    """One row inside a loop: the way to each value there."""

    task: KernelTask
    lines: Lines
    index: Callable[[RowMap | None], str]
    """Returns the target of a map for the row, as an expression; for None the row itself."""
    computed: frozenset[int]
    """Values that are computed for this row here, unless they are in `arrays`."""
    rooted: frozenset[int]
    """Those of them that are stored when they are first read."""
    arrays: dict[int, str]
    """Rows that are there, by position: the names of arrays."""
    memory: Callable[[int], str | None] = lambda position: None
    """Returns the address to store a value at; None for a local array."""
    grouping: RowMap | None = None
    sums: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Finished sums of the row's group, which are read along `grouping`."""
    ahead: Callable[[RowMap | None], str | None] = lambda row_map: None
    """Returns the target of a map for a row that comes some rows later; None if it is no jump."""
    _pointers: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict)

    def write_element(self, position: int, subscript: Subscript) -> str:
        """Return the expression of one element of a value at this row; `require` it first."""
        found = self._find_array(position)
        if found is not None:
            return f"{found}[{write_offset(self.task.node(position).shape, subscript)}]"
        return self.write_expression(position, subscript)

    def require(self, position: int) -> None:
        """Write all that the expression of an element needs, ahead of a loop over elements."""
        if self._find_array(position) is None:
            for operand in self.task.node(find_source(self.task.program, position)).operands:
                self.require(operand)

    def _find_array(self, position: int) -> str | None:
        """Return the array with a value's row, written here if need be; None for an expression."""
        maps = find_maps(self.task.program, position)
        value = find_source(self.task.program, position)
        if maps == (self.grouping,) and value in self.sums:
            return self.sums[value]
        if not maps:
            if value in self.arrays:
                return self.arrays[value]
            if value in self.computed:
                if value in self.rooted:
                    self.arrays[value] = self._store(value)
                return self.arrays.get(value)
        return self._declare_pointer(value, maps)

    def _declare_pointer(self, value: int, maps: Sequence[RowMap]) -> str:
        """Return a pointer to the row of a leaf, or of a value that another kernel wrote."""
        row = self._write_row_index(maps)
        if (value, row) not in self._pointers:
            name = f"row{len(self._pointers)}_of_{value}"
            self.lines.add(f"const T* const {name} = {self.write_address(value, row)};")
            self._pointers[value, row] = name
            self._prefetch(value, maps)
        return self._pointers[value, row]

    def _prefetch(self, value: int, maps: Sequence[RowMap]) -> None:
        """Ask for a long row ahead of its turn: rows that are jumped to are in no cache yet."""
        count = self.task.size(value)
        later = self.ahead(maps[0] if maps else None) if len(maps) < 2 else None
        if later is not None and count >= _MIN_PREFETCHED:
            self.lines.add(f"prefetch<T, {count}>({self.write_address(value, later)});")

    def write_location(self, position: int) -> str:
        """Return the address of the row that a chain of reads ends in; it writes no statement."""
        row = self._write_row_index(find_maps(self.task.program, position))
        return self.write_address(find_source(self.task.program, position), row)

    def _write_row_index(self, maps: Sequence[RowMap]) -> str:
        row = self.index(maps[0] if maps else None)
        for row_map in maps[1:]:
            is_one = row_map.into is Space.ONE
            row = "0" if is_one else f"{self.task.fields.array('index', row_map)}[{row}]"
        return row

    def write_address(self, value: int, row: str) -> str:
        """Return the address of the row of a leaf or of a value in memory."""
        node = self.task.node(value)
        if node.op == "inverse_count":
            base, step = self.task.fields.inverse_count(node.map), "1"
        elif node.op == "input":
            base, step = self.task.fields.input(value), self.task.fields.stride(value)
        else:
            base, step = self.task.fields.value(value), str(math.prod(node.shape))
        return base if row == "0" else f"{base} + int64_t({row}) * {step}"

    def _store(self, position: int) -> str:
        for operand in self.task.node(position).operands:
            self.require(operand)
        name, place = f"v{position}", self.memory(position)
        if place is None:
            self.lines.add(declare_array(name, self.task.size(position)))
        else:
            self.lines.add(f"T* const {name} = {place};")
        write_row(self, position, name)
        return name

    def write_expression(self, position: int, subscript: Subscript) -> str:
        """Return the expression of an elementwise operator."""
        node = self.task.node(position)
        shapes = [self.task.node(operand).shape for operand in node.operands]

        def operand(place: int, at: Subscript = subscript) -> str:
            return self.write_element(node.operands[place], stretch(shapes[place], at))

        if node.op in _INFIX:
            return f"({operand(0)} {_INFIX[node.op]} {operand(1)})"
        if node.op == "relu_gradient":
            return f"relu_gradient<T>({operand(0)}, {operand(1)})"
        if node.op in UNARY:
            return _write_unary(node, operand(0))
        if node.op == "expand":
            return operand(0)
        if node.op == "slice":
            axis, begin = node["axis"], node["begin"]
            moved = f"({subscript[axis]} + {begin})" if begin else subscript[axis]
            return operand(0, (*subscript[:axis], moved, *subscript[axis + 1 :]))
        if node.op == "matmul":  # with a matrix of one row, read as it is or transposed
            *batch, column = subscript
            heads = batch[: len(shapes[1]) - 2]
            matrix = (*heads, column, "0") if node["transposed"] else (*heads, "0", column)
            vector = self.write_element(node.operands[0], (*stretch(shapes[0][:-1], batch), "0"))
            return f"({vector} * {self.write_element(node.operands[1], matrix)})"
        assert node.op == "outer", node.op
        *heads, row, column = subscript
        left = self.write_element(node.operands[0], (*stretch(shapes[0][:-1], heads), row))
        right = self.write_element(node.operands[1], (*stretch(shapes[1][:-1], heads), column))
        return f"({left} * {right})"


def write_row(scope: Scope, position: int, name: str) -> None:
    """Write statements that fill the array `name` with the row of a value."""
    lines, node = scope.lines, scope.task.node(position)
    shape = node.shape
    if is_elementwise(scope.task.program, position):
        with lines.loops(shape) as at:
            lines.add(
                f"{name}[{write_offset(shape, at)}] = {scope.write_expression(position, at)};"
            )
    elif node.op == "dot":
        with lines.loops(shape, simd=False) as at:
            left, right = ((operand, (*at, "k")) for operand in node.operands)
            length = scope.task.node(node.operands[0]).shape[-1]
            _write_dot(scope, left, right, length, f"{name}[{write_offset(shape, at)}]")
    elif node.op == "matmul":
        _write_product(scope, node, name)
    elif node.op == "outer":
        _write_outer(scope, node, name)
    elif node.op == "total":
        lines.add(f"memset({name}, 0, {math.prod(shape)} * sizeof(T));")
        operand = node.operands[0]
        with lines.loops(scope.task.node(operand).shape, simd=False) as at:
            into = tuple("0" if axis in node["axes"] else i for axis, i in enumerate(at))
            lines.add(f"{name}[{write_offset(shape, into)}] += {scope.write_element(operand, at)};")
    else:
        _write_joined(scope, node, name)


def _write_dot(
    scope: Scope, left: tuple[int, Subscript], right: tuple[int, Subscript], length: int, place: str
) -> None:
    """Sum over `k` of two elements, each a value and its subscript before it is broadcast."""
    factors = [
        scope.write_element(operand, stretch(scope.task.node(operand).shape, at))
        for operand, at in (left, right)
    ]
    lines = scope.lines
    with lines.block("{"):
        lines.add("T total = 0;", "#pragma omp simd reduction(+ : total)")
        lines.add(f"for (int64_t k = 0; k < {length}; ++k) total += {' * '.join(factors)};")
        lines.add(f"{place} = total;")


def _write_product(scope: Scope, node: Node, name: str) -> None:
    """Write a row's vectors times its own matrix."""
    lines, shape = scope.lines, node.shape
    vector, matrix = node.operands
    *heads, rows, columns = scope.task.node(matrix).shape
    num_heads = len(heads)
    if node["transposed"] or columns == 1:  # a dot for each element of the result
        with lines.loops(shape, simd=False) as at:
            ends = (at[-1], "k") if node["transposed"] else ("k", at[-1])
            of_matrix = (matrix, (*at[:num_heads], *ends))
            length = columns if node["transposed"] else rows
            place = f"{name}[{write_offset(shape, at)}]"
            _write_dot(scope, (vector, (*at[:-1], "k")), of_matrix, length, place)
        return
    vector_shape = scope.task.node(vector).shape
    lines.add(f"memset({name}, 0, {math.prod(shape)} * sizeof(T));")
    with lines.loops((*shape[:-1], rows), simd=False) as at, lines.block("{"):
        lines.add(f"const T left = {scope.write_element(vector, stretch(vector_shape, at))};")
        with lines.loops((columns,), prefix="n") as (n,):
            right = scope.write_element(matrix, (*at[:num_heads], at[-1], n))
            lines.add(f"{name}[{write_offset(shape, (*at[:-1], n))}] += left * {right};")


def _write_outer(scope: Scope, node: Node, name: str) -> None:
    """Write an outer product, summed over the batch axes behind the heads."""
    lines, shape = scope.lines, node.shape
    lines.add(f"memset({name}, 0, {math.prod(shape)} * sizeof(T));")
    left, right = (scope.task.node(operand).shape for operand in node.operands)
    longest = max(len(left), len(right)) - 1
    axes = [
        max(axis or 1 for axis in pair) for pair in itertools.zip_longest(left[:-1], right[:-1])
    ][:longest]
    with lines.loops((*axes, left[-1], right[-1])) as (*batch, row, column):
        first = scope.write_element(node.operands[0], (*stretch(left[:-1], batch), row))
        second = scope.write_element(node.operands[1], (*stretch(right[:-1], batch), column))
        into = write_offset(shape, (*batch[: node["heads"]], row, column))
        lines.add(f"{name}[{into}] += {first} * {second};")


def _write_joined(scope: Scope, node: Node, name: str) -> None:
    lines, shape, axis = scope.lines, node.shape, node["axis"]
    begin = 0
    if node.op == "pad":
        lines.add(f"memset({name}, 0, {math.prod(shape)} * sizeof(T));")
        begin = node["begin"]
    for operand in node.operands:
        part = scope.task.node(operand).shape
        with lines.loops(part) as at:
            moved = (*at[:axis], f"({at[axis]} + {begin})", *at[axis + 1 :])
            lines.add(f"{name}[{write_offset(shape, moved)}] = {scope.write_element(operand, at)};")
        begin += part[axis]


def declare_array(name: str, length: int, *, is_zero: bool = False) -> str:
    """Return the declaration of an array: on the stack, unless it might not fit there."""
    if length <= _STACK_NUMBERS:
        return f"T {name}[{length}]{' = {}' if is_zero else ''};"
    fill = f" memset({name}, 0, {length} * sizeof(T));" if is_zero else ""
    return f"Scratch<T> {name}({length});{fill}"


def stretch(shape: Shape, subscript: Sequence[str]) -> Subscript:
    """Return the subscript of an operand with a broadcast row, lined up from the left."""
    return tuple("0" if n == 1 else i for n, i in zip(shape, subscript, strict=False))


def write_offset(shape: Shape, subscript: Sequence[str]) -> str:
    """Return the offset of an element in a contiguous row."""
    terms, step = [], 1
    for length, index in zip(reversed(shape), reversed(tuple(subscript)), strict=True):
        if length != 1 and index != "0":
            terms.append(index if step == 1 else f"{index} * {step}")
        step *= length
    return " + ".join(reversed(terms)) or "0"


def write_constant(value: float) -> str:
    """Return a number as C++ has it."""
    if math.isnan(value):
        return 'T(__builtin_nan(""))'
    if math.isinf(value):
        return "T(__builtin_inf())" if value > 0 else "T(-__builtin_inf())"
    return f"T({float(value)!r})"


def _write_unary(node: Node, x: str) -> str:
    if node.op in ("scale", "shift"):
        return f"({x} {'*' if node.op == 'scale' else '+'} {write_constant(node['value'])})"
    if node.op == "reciprocal":
        return f"(T(1) / {x})"
    if node.op in ("leaky_relu", "leaky_relu_slope"):
        return f"{node.op}<T>({x}, {write_constant(node['value'])})"
    if node.op in ("sigmoid", "relu"):
        return f"{node.op}<T>({x})"
    return f"{_FUNCTIONS[node.op]}({x})"
