"""Decisions of rewrites with their reasons, the rewriter of all local ones, and the simplest one.

Common subexpressions: what is computed twice from the same is computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from penstock.rgnn.ir import READS, TYPES, Program, ProgramBuilder
from penstock.rgnn.spaces import RowMap


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One place where a rewrite could apply."""

    rewrite: str
    applied: bool
    what: str
    """The expression at hand."""
    reason: str
    where: str
    """The user's line."""

    def __str__(self) -> str:
        verb = "applied" if self.applied else "rejected"
        return f"{self.rewrite} {verb}: {self.what}: {self.reason}  [{self.where}]"


PassResult = tuple[Program, Sequence[Decision]]
"""A program after a rewrite, and the decisions on the way."""


@dataclasses.dataclass(slots=True)
class Rewriter:
    """A program being rebuilt node by node; a rewrite looks at the old one and adds to the new."""

    program: Program
    name: str
    builder: ProgramBuilder = dataclasses.field(default_factory=ProgramBuilder)
    place: list[int] = dataclasses.field(default_factory=list)
    """Position of each old node in the new program."""
    decisions: list[Decision] = dataclasses.field(default_factory=list)

    def run(self, rewrite: Callable[[Rewriter, int], int | None]) -> PassResult:
        """Rebuild the program; where `rewrite` returns a new position, that replaces the node."""
        for position, node in enumerate(self.program.nodes):
            self.builder.where = node.where
            new = rewrite(self, position)
            self.place.append(self.copy(position) if new is None else new)
        outputs = [self.place[output] for output in self.program.outputs]
        return self.builder.program(outputs), self.decisions

    def copy(self, position: int) -> int:
        """Add a node as it is, on the new operands."""
        node = self.program.nodes[position]
        return self.builder.copy(node, [self.place[operand] for operand in node.operands])

    def is_only_used_by(self, position: int, user: int) -> bool:
        """Return whether a value has no reader but one node and is no output."""
        users = {at for at, node in enumerate(self.program.nodes) if position in node.operands}
        return users == {user} and position not in self.program.outputs

    def decide(self, position: int, applied: bool, what: str, reason: str) -> bool:
        """Record a decision about a node; return whether the rewrite applies."""
        where = self.program.nodes[position].where
        self.decisions.append(Decision(self.name, applied, what, reason, where))
        return applied

    def find_typed_map(self, position: int) -> RowMap | None:
        """Return the map along which a weight is read, if the value is one."""
        node = self.program.nodes[position]
        return node.map if node.op == "gather" and node.map.into in TYPES else None


def common_subexpressions(program: Program) -> PassResult:
    """Let equal nodes be one, and drop what nothing needs."""

    def rewrite(rewriter: Rewriter, position: int) -> int:
        node, num_before = program.nodes[position], len(rewriter.builder.nodes)
        new = rewriter.copy(position)
        # Reads cost nothing by themselves and need no mention.
        if len(rewriter.builder.nodes) == num_before and node.op not in READS:
            reason = f"computed already by {rewriter.builder.nodes[new].where}"
            rewriter.decide(position, True, node.op, reason)
        return new

    builder = ProgramBuilder(share=True)
    return Rewriter(program, "common subexpressions", builder).run(rewrite)
