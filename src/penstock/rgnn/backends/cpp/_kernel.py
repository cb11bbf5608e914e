"""A kernel to write as C++: the struct that its function takes, and rowwise operators in it.

The members of the struct are pointers and numbers of 8 bytes. The source names one when it first
needs it; `_graph_arrays.py` fills in those of a graph, and `_backend.py` those of a call.

Rowwise operators are expressions if possible, else statements. A scope is one row of some space
inside a loop. It is the way to read the row of any value there: a pointer into memory, an array of
the group's sums, or an expression that is computed on the spot.
Elementwise operators stay expressions until something needs all elements at once, so that a chain
of them becomes one loop over features and its intermediates live in registers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.rgnn.ir import Node, Program, Shape, broadcast, find_maps, find_source
from penstock.rgnn.lowering import Kernel, is_elementwise
from penstock.rgnn.spaces import RowMap, Space

Subject = int | RowMap | Space
"""The position of a value; or maps, or a space, of a graph."""
Subscript = tuple[str, ...]
"""One expression for each axis of a row."""

_STACK_NUMBERS = 4096  # as `kStackNumbers`; a thread's stack may be 2 MiB
_MIN_PREFETCHED = 8  # elements of a row: what takes a cache line of its own
_EXPRESSIONS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "relu_gradient": "relu_gradient<T>({0}, {1})",
    "scale": "({0} * {value})",
    "shift": "({0} + {value})",
    "reciprocal": "(T(1) / {0})",
    "exp": "exponential({0})",
    "log": "logarithm({0})",
    "tanh": "hyperbolic_tangent({0})",
    "sigmoid": "sigmoid<T>({0})",
    "relu": "relu<T>({0})",
    "leaky_relu": "leaky_relu<T>({0}, {value})",
    "leaky_relu_slope": "leaky_relu_slope<T>({0}, {value})",
    "expand": "{0}",
}
"""Expressions of elements of operands that are lined up, by operator."""

FIELDS_OF_CALL = {
    "num_threads": "int64_t",
    "value": "T*",  # rows of a value that some kernel writes
    "input": "const T*",  # rows of an argument
    "stride": "int64_t",  # elements from one row of an argument to the next
    "parts": "T*",  # for the part of a sum over rows of types that each task computes
    "packed": "T*",  # for the matrices of a product, laid out as its loops read them
}
"""Kinds of fields that a call fills in, each of one value: their C++ types. All others are methods
of `GraphArrays`, or the number of elements or intervals of one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One member of the struct."""

    kind: str
    subjects: tuple[Subject, ...]

    @property
    def name(self) -> str:
        """The name of the member."""
        return "_".join([self.kind, *map(_name_subject, self.subjects)])

    @property
    def declaration(self) -> str:
        """The declaration of the member."""
        is_number = self.kind.startswith(("num_", "longest_"))
        of_graph = "int64_t" if is_number else "const Index*"
        if self.kind == "inverse_count":
            of_graph = "const T*"
        return f"{FIELDS_OF_CALL.get(self.kind, of_graph)} {self.name};"


def _name_subject(subject: Subject) -> str:
    if isinstance(subject, int):
        return str(subject)
    return subject.name.lower().replace(".", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTask:
    """A kernel, and all that its source depends on.

    Attributes:
        program: The program that it belongs to.
        materialised: Values of the program that are written to memory.
        kernel: The kernel.
        head: First line of its function, with the opening brace.
        fields: Members of the struct that its function takes, in order; writing adds to them.
        has_hubs: Whether groups that are too long for one thread are cut.
    """

    program: Program
    materialised: frozenset[int]
    kernel: Kernel
    head: str
    fields: dict[Field, None]
    has_hubs: bool = False

    def node(self, value: int) -> Node:
        """Return the node that computes a value."""
        return self.program.nodes[value]

    def size(self, value: int) -> int:
        """Return the number of elements in a row of a value."""
        return math.prod(self.program.nodes[value].shape)

    def field(self, kind: str, *subjects: Subject) -> str:
        """Add a member to the struct; return the expression by which the source reads it."""
        field = Field(kind, subjects)
        self.fields.setdefault(field)
        return f"f.{field.name}"

    def counted_array(self, kind: str, row_map: RowMap) -> tuple[str, str]:
        """Add an array of a graph, and the number of its elements or intervals."""
        return self.field(kind, row_map), self.field(f"num_{kind}", row_map)

    def follow(self, maps: Iterable[RowMap], row: str) -> str:
        """Return the row that maps lead to from one, as an expression."""
        for row_map in maps:
            row = "0" if row_map.into is Space.ONE else f"{self.field('index', row_map)}[{row}]"
        return row

    def address(self, value: int, row: str) -> str:
        """Return the address of a row of a leaf, or of a value in memory."""
        node = self.node(value)
        if node.op == "inverse_count":
            base, step = self.field("inverse_count", node.map), "1"
        elif node.op == "input":
            base, step = self.field("input", value), self.field("stride", value)
        else:
            base, step = self.field("value", value), str(self.size(value))
        return base if row == "0" else f"{base} + int64_t({row}) * {step}"

    def locate(self, position: int, *, of_type: bool = False) -> str:
        """Return the address of the row of an operand that a `row` of the kernel's space reads.

        Args:
            position: The operand.
            of_type: Whether it is read along a map to the `type` of the row, which is known.
        """
        maps, row = find_maps(self.program, position), "row"
        if of_type:
            row = "0" if maps[0].into is Space.ONE else "type"
            maps = maps[1:]
        return self.address(find_source(self.program, position), self.follow(maps, row))


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
    kept: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Addresses to store values at that a later stage reads."""
    grouping: RowMap | None = None
    sums: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Finished sums of the row's group, which are read along `grouping`."""
    ahead: Callable[[RowMap | None], str | None] = lambda row_map: None
    """Returns the target of a map for a row that comes some rows later; None if it is no jump."""
    _pointers: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict)

    def write_element(self, position: int, subscript: Subscript) -> str:
        """Return the expression of one element of a value at this row; `require` it first.

        Args:
            position: The value.
            subscript: The element's, of a row that the value's lines up with from the left.
        """
        shape, found = self.task.node(position).shape, self._find_array(position)
        if found is not None:
            return f"{found}[{write_offset(shape, stretch(shape, subscript))}]"
        return self.write_expression(position, stretch(shape, subscript))

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
        first = maps[0] if maps else None
        row = self.task.follow(maps[1:], self.index(first))
        if (value, row) not in self._pointers:
            name = f"row{len(self._pointers)}_of_{value}"
            self.lines.add(f"const T* const {name} = {self.task.address(value, row)};")
            self._pointers[value, row] = name
            # Rows that are jumped to are in no cache yet: long ones are asked for ahead of time.
            later, count = self.ahead(first) if len(maps) < 2 else None, self.task.size(value)
            if later is not None and count >= _MIN_PREFETCHED:
                self.lines.add(f"prefetch<T, {count}>({self.task.address(value, later)});")
        return self._pointers[value, row]

    def _store(self, position: int) -> str:
        for operand in self.task.node(position).operands:
            self.require(operand)
        name, place = f"v{position}", self.kept.get(position)
        if position in self.task.materialised:
            place = self.task.address(position, self.index(None))
        if place is None:
            self.lines.add(declare_array(name, self.task.size(position)))
        else:
            self.lines.add(f"T* const {name} = {place};")
        write_row(self, position, name)
        return name

    def write_expression(self, position: int, subscript: Subscript) -> str:
        """Return the expression of an elementwise operator."""
        node = self.task.node(position)
        if node.op in _EXPRESSIONS:
            elements = [self.write_element(operand, subscript) for operand in node.operands]
            attributes = dict(node.attributes)
            value = write_constant(attributes["value"]) if "value" in attributes else ""
            return _EXPRESSIONS[node.op].format(*elements, value=value)
        if node.op == "slice":
            axis, begin = node["axis"], node["begin"]
            moved = f"({subscript[axis]} + {begin})" if begin else subscript[axis]
            at = (*subscript[:axis], moved, *subscript[axis + 1 :])
            return self.write_element(node.operands[0], at)
        left, right = (self.task.node(operand).shape[:-1] for operand in node.operands)
        if node.op == "matmul":  # with a matrix of one row, read as it is or transposed
            *batch, column = subscript
            ends = (column, "0") if node["transposed"] else ("0", column)
            first, second = (*stretch(left, batch), "0"), (*batch[: len(right) - 1], *ends)
        else:
            assert node.op == "outer", node.op
            *heads, row, column = subscript
            first, second = (*stretch(left, heads), row), (*stretch(right, heads), column)
        vector = self.write_element(node.operands[0], first)
        return f"({vector} * {self.write_element(node.operands[1], second)})"


def write_row(scope: Scope, position: int, name: str) -> None:
    """Write statements that fill the array `name` with the row of a value."""
    lines, node = scope.lines, scope.task.node(position)
    shape, operands = node.shape, node.operands
    of_operands = [scope.task.node(operand).shape for operand in operands]
    if is_elementwise(scope.task.program, position):
        with lines.loops(shape) as at:
            lines.add(
                f"{name}[{write_offset(shape, at)}] = {scope.write_expression(position, at)};"
            )
    elif node.op == "dot":
        with lines.loops(shape, simd=False) as at:
            left, right = (scope.write_element(operand, (*at, "k")) for operand in operands)
            place = f"{name}[{write_offset(shape, at)}]"
            _write_dot(lines, left, right, of_operands[0][-1], place)
    elif node.op == "matmul":
        _write_product(scope, node, name)
    elif node.op == "outer":  # summed over the batch axes behind the heads
        lines.add(write_zeros(name, math.prod(shape)))
        left, right = of_operands
        batch_axes = broadcast(left[:-1], right[:-1])
        with lines.loops((*batch_axes, left[-1], right[-1])) as (*batch, row, column):
            first = scope.write_element(operands[0], (*stretch(left[:-1], batch), row))
            second = scope.write_element(operands[1], (*stretch(right[:-1], batch), column))
            into = write_offset(shape, (*batch[: node["heads"]], row, column))
            lines.add(f"{name}[{into}] += {first} * {second};")
    elif node.op == "total":
        lines.add(write_zeros(name, math.prod(shape)))
        with lines.loops(of_operands[0], simd=False) as at:
            into = write_offset(shape, stretch(shape, at))
            lines.add(f"{name}[{into}] += {scope.write_element(operands[0], at)};")
    else:
        _write_joined(scope, node, name)


def _write_joined(scope: Scope, node: Node, name: str) -> None:
    lines, shape, axis, begin = scope.lines, node.shape, node["axis"], 0
    if node.op == "pad":
        lines.add(write_zeros(name, math.prod(shape)))
        begin = node["begin"]
    for operand in node.operands:
        part = scope.task.node(operand).shape
        with lines.loops(part) as at:
            moved = (*at[:axis], f"({at[axis]} + {begin})", *at[axis + 1 :])
            lines.add(f"{name}[{write_offset(shape, moved)}] = {scope.write_element(operand, at)};")
        begin += part[axis]


def _write_dot(lines: Lines, left: str, right: str, length: int, place: str) -> None:
    """Sum the product of two elements over `k`."""
    with lines.block("{"):
        lines.add(
            "T total = 0;",
            "#pragma omp simd reduction(+ : total)",
            f"for (int64_t k = 0; k < {length}; ++k) total += {left} * {right};",
            f"{place} = total;",
        )


def _write_product(scope: Scope, node: Node, name: str) -> None:
    """Write a row's vectors times its own matrix."""
    lines, shape = scope.lines, node.shape
    vector, matrix = node.operands
    *heads, rows, columns = scope.task.node(matrix).shape
    num_heads = len(heads)
    if node["transposed"] or columns == 1:  # a dot for each element of the result
        with lines.loops(shape, simd=False) as at:
            ends = (at[-1], "k") if node["transposed"] else ("k", at[-1])
            left = scope.write_element(vector, (*at[:-1], "k"))
            right = scope.write_element(matrix, (*at[:num_heads], *ends))
            length = columns if node["transposed"] else rows
            _write_dot(lines, left, right, length, f"{name}[{write_offset(shape, at)}]")
        return
    lines.add(write_zeros(name, math.prod(shape)))
    with lines.loops((*shape[:-1], rows), simd=False) as at, lines.block("{"):
        lines.add(f"const T left = {scope.write_element(vector, at)};")
        with lines.loops((columns,), prefix="n") as (n,):
            right = scope.write_element(matrix, (*at[:num_heads], at[-1], n))
            lines.add(f"{name}[{write_offset(shape, (*at[:-1], n))}] += left * {right};")


def write_zeros(name: str, length: int | str) -> str:
    """Return the statement that fills an array with zeros."""
    return f"memset({name}, 0, {length} * sizeof(T));"


def declare_array(name: str, length: int, *, is_zero: bool = False) -> str:
    """Return the declaration of an array: on the stack, unless it might not fit there."""
    if length <= _STACK_NUMBERS:
        return f"T {name}[{length}]{' = {}' if is_zero else ''};"
    fill = f" {write_zeros(name, length)}" if is_zero else ""
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
