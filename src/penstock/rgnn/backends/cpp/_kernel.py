"""A kernel to write as C++, and the struct that its function takes.

The members of the struct are pointers and numbers of 8 bytes. The source names one when it first
needs it; `_graph_arrays.py` fills in those of a graph, and `_backend.py` those of a call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from penstock.rgnn.ir import Node, Program, find_maps, find_source
from penstock.rgnn.lowering import Kernel
from penstock.rgnn.spaces import RowMap, Space

Subject = int | RowMap | Space
"""The position of a value; or maps, or a space, of a graph."""

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
