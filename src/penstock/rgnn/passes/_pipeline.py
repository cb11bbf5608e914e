"""The passes in their order: from a traced program to one with gradients, and the decisions taken.

The order matters. Reordering and aggregate-first look at what else needs an intermediate, so they
come before differentiation, which needs nearly all of them; compaction comes before it too, because
the backward of a compact program is compact by itself. What the backward recomputes is decided
last, when it is known what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from penstock.rgnn.ir import Program, find_dependencies, find_source
from penstock.rgnn.passes._aggregate import aggregate_first
from penstock.rgnn.passes._compact import compact
from penstock.rgnn.passes._decision import Decision, PassResult, common_subexpressions
from penstock.rgnn.passes._differentiate import differentiate
from penstock.rgnn.passes._recompute import recompute
from penstock.rgnn.passes._reorder import reorder, split_concat
from penstock.rgnn.spaces import Counts

REWRITES = (
    "common subexpressions",
    "split concat",
    "reorder",
    "aggregate first",
    "compaction",
    "recompute",
)
"""The rewrites by name, in the order in which they run; each can be switched off."""


@dataclasses.dataclass(frozen=True)
class OptimizedProgram:
    """A program laid out for graphs with about these counts, with its gradients.

    Attributes:
        traced: The program as the user wrote it.
        program: The program laid out: the outputs, then the gradients.
        num_outputs: Number of outputs before the gradients.
        wrt: The inputs that the gradients belong to.
        decisions: Decisions of the rewrites, applied or not.
        without: The rewrites that were switched off.
        counts: Rows of the graphs that it is for, about.
    """

    traced: Program
    program: Program
    num_outputs: int
    wrt: tuple[str, ...]
    decisions: tuple[Decision, ...]
    without: frozenset[str]
    counts: Counts

    @cached_property
    def forward(self) -> frozenset[int]:
        """The values that the outputs need."""
        return find_dependencies(self.program.nodes, self.program.outputs[: self.num_outputs])

    @cached_property
    def backward(self) -> frozenset[int]:
        """The values that only the gradients need."""
        return find_dependencies(self.program.nodes, self.program.outputs) - self.forward

    @cached_property
    def kept(self) -> frozenset[int]:
        """Inputs and values of the forward that the backward reads, at the source of reads.

        The inverse counts are the graph's and need not be kept.
        """
        nodes = self.program.nodes
        read = [operand for at in self.backward for operand in nodes[at].operands]
        read += self.program.outputs[self.num_outputs :]
        found = {find_source(self.program, position) for position in read} & self.forward
        return frozenset(at for at in found if nodes[at].op != "inverse_count")


def check_rewrites(without: Collection[str]) -> None:
    """Raise `ValueError` if a name is none of `REWRITES`."""
    if unknown := sorted(set(without) - set(REWRITES)):
        raise ValueError(f"without has {unknown}; the rewrites are {list(REWRITES)}")


def optimize(
    traced: Program, counts: Counts, *, wrt: Sequence[str] = (), without: Collection[str] = ()
) -> OptimizedProgram:
    """Rewrite, lay out and differentiate a program for graphs with these counts.

    Args:
        traced: The program as the front end made it.
        counts: Rows of the graph.
        wrt: Inputs that get gradients.
        without: Names of `REWRITES` to leave out.
    """
    check_rewrites(without)
    can_compact = "compaction" not in without
    before_gradients: dict[str, Callable[[Program], PassResult]] = {
        "common subexpressions": common_subexpressions,
        "split concat": split_concat,
        "reorder": lambda p: reorder(p, counts, can_compact=can_compact),
        "aggregate first": lambda p: aggregate_first(p, counts, can_compact=can_compact),
        "compaction": lambda p: compact(p, counts),
    }
    program, decisions = traced, []
    for name, rewrite in before_gradients.items():
        if name not in without:
            program, found = rewrite(program)
            decisions += found
    joint = differentiate(program, wrt)
    program = joint.program
    if "common subexpressions" not in without:
        # Of the backward only: the forward's have been decided, and are not mentioned again.
        program, _ = common_subexpressions(program)
    optimized = OptimizedProgram(
        traced, program, joint.num_outputs, joint.wrt, (), frozenset(without), counts
    )
    if "recompute" not in without:
        program, found = recompute(program, optimized.forward, optimized.kept, counts)
        decisions += found
    return dataclasses.replace(optimized, program=program, decisions=tuple(decisions))
