"""From a traced program to a plan: the rewrites in their order, and the decisions they took.

The order matters. Reordering and aggregate-first look at what else needs an intermediate, so they
come before differentiation, which needs nearly all of them; compaction comes before it too, because
the backward of a compact program is compact by itself. What the backward makes again is decided
last, when it is known what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from functools import cached_property

from penstock.rgnn._differentiate import differentiate
from penstock.rgnn._fuse import add_rows, sum_products
from penstock.rgnn._ir import Program
from penstock.rgnn._order import Ordered, order
from penstock.rgnn._passes import (
    Decision,
    Rewritten,
    aggregate_first,
    common_subexpressions,
    compact,
    recompute,
    reorder,
    split_concat,
)
from penstock.rgnn._rows import Counts
from penstock.rgnn._schedule import Schedule, lower, source

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
class Plan:
    """A program laid out for a graph, with its gradients."""

    traced: Program
    """As the user wrote it."""
    program: Program
    """Laid out: the outputs, then the gradients."""
    num_outputs: int
    wrt: tuple[str, ...]
    """The inputs that the gradients belong to."""
    decisions: tuple[Decision, ...]
    """What each rewrite did and did not do."""
    without: frozenset[str]
    """The rewrites that were switched off."""
    counts: Counts
    """Rows of the graphs that it is for, about."""

    compiled: dict[Hashable, object] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    """What backends have made of it."""

    @cached_property
    def forward(self) -> frozenset[int]:
        """The values that the outputs need."""
        return needed(self.program, self.program.outputs[: self.num_outputs])

    @cached_property
    def backward(self) -> frozenset[int]:
        """The values that only the gradients need."""
        return needed(self.program, self.program.outputs) - self.forward

    @cached_property
    def kept(self) -> frozenset[int]:
        """Inputs and values of the forward that the backward reads, at the source of reads.

        The inverse counts are the graph's and need not be kept.
        """
        nodes = self.program.nodes
        read = [operand for at in self.backward for operand in nodes[at].operands]
        read += self.program.outputs[self.num_outputs :]
        found = {source(self.program, position) for position in read} & self.forward
        return frozenset(at for at in found if nodes[at].op != "inverse_count")

    @cached_property
    def schedule(self) -> Schedule:
        """The kernels of the forward, then those of the backward."""
        return lower(self.program, self.forward)

    @cached_property
    def summed_schedule(self) -> Schedule:
        """The same, for a backend that sums products where it makes them and owns its memory."""
        return self.ordered.schedule

    @cached_property
    def ordered(self) -> Ordered:
        """`summed_schedule`, and what its order saves."""
        schedule = add_rows(self.program, sum_products(self.program, self.schedule, self.counts))
        outputs = {source(self.program, output) for output in self.program.outputs}
        return order(self.program, schedule, self.kept | outputs, self.counts)


def make_plan(
    traced: Program, counts: Counts, *, wrt: Sequence[str] = (), without: Collection[str] = ()
) -> Plan:
    """Rewrite, lay out and differentiate a program for graphs with these counts.

    Args:
        traced: As the frontend made it.
        counts: Rows of the graph.
        wrt: Inputs whose gradients are wanted.
        without: Names of `REWRITES` to leave out.

    Raises:
        ValueError: A name in `without` is no rewrite.
    """
    if unknown := sorted(set(without) - set(REWRITES)):
        raise ValueError(f"without has {unknown}; the rewrites are {list(REWRITES)}")
    program = traced
    decisions: list[Decision] = []

    def run(name: str, rewritten: Rewritten) -> Program:
        decisions.extend(rewritten.decisions)
        return rewritten.program

    on = [name for name in REWRITES if name not in without]
    can_compact = "compaction" in on
    for name in on:
        if name == "common subexpressions":
            program = run(name, common_subexpressions(program))
        elif name == "split concat":
            program = run(name, split_concat(program))
        elif name == "reorder":
            program = run(name, reorder(program, counts, can_compact=can_compact))
        elif name == "aggregate first":
            program = run(name, aggregate_first(program, counts, can_compact=can_compact))
        elif name == "compaction":
            program = run(name, compact(program, counts))
    joint = differentiate(program, wrt)
    program = joint.program
    if "common subexpressions" in on:
        # Of the backward only: what it shares with the forward it finds by itself.
        program = common_subexpressions(program).program
    plan = Plan(traced, program, joint.num_outputs, joint.wrt, (), frozenset(without), counts)
    if "recompute" in on:
        program = run("recompute", recompute(program, plan.forward, plan.kept, counts))
    return dataclasses.replace(plan, program=program, decisions=tuple(decisions), compiled={})


def needed(program: Program, outputs: Sequence[int]) -> frozenset[int]:
    """The positions of all values that some outputs are computed from, themselves included."""
    found = set(outputs)
    for position in range(len(program.nodes) - 1, -1, -1):
        if position in found:
            found.update(program.nodes[position].operands)
    return frozenset(found)
