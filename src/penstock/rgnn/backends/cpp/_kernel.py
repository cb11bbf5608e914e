"""A kernel to write as C++: the one value that its writers take."""

from __future__ import annotations

import dataclasses
import math

from penstock.rgnn.backends.cpp._fields import Fields
from penstock.rgnn.ir import Node, Program
from penstock.rgnn.lowering import Kernel


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTask:
    """A kernel, and all that its source depends on.

    Attributes:
        program: The program that it belongs to.
        materialised: Values of the program that are written to memory.
        kernel: The kernel.
        head: First line of its function, with the opening brace.
        fields: Members of the struct that its function takes; writing adds to them.
        has_hubs: Whether groups that are too long for one thread are cut.
    """

    program: Program
    materialised: frozenset[int]
    kernel: Kernel
    head: str
    fields: Fields
    has_hubs: bool = False

    def node(self, value: int) -> Node:
        """Return the node that computes a value."""
        return self.program.nodes[value]

    def size(self, value: int) -> int:
        """Return the number of elements in a row of a value."""
        return math.prod(self.program.nodes[value].shape)
