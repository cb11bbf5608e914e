"""The passes in their order: from a traced program to one with gradients, and the decisions taken.

The order matters. Reordering and aggregate-first look at what else needs an intermediate, so they
come before differentiation, which needs nearly all of them; compaction comes before it too, because
the backward of a compact program is compact by itself. What the backward recomputes is decided
last, when it is known what it reads.

A cheap value that only the backward still needs is recomputed, not kept: a score of an edge is
often made of one number of its source and one of its destination, of which there are fewer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

from penstock._lazy import cached_property
from penstock.rgnn.ir import (
    BINARY,
    LEAVES,
    READS,
    Program,
    find_dependencies,
    find_source,
)
from penstock.rgnn.passes._compact import compact
from penstock.rgnn.passes._decision import Decision, PassResult, Rewriter, common_subexpressions
from penstock.rgnn.passes._differentiate import differentiate, drop_seeds
from penstock.rgnn.passes._reorder import aggregate_first, reorder, split_concat
from penstock.rgnn.spaces import Counts

_BEFORE_GRADIENTS: dict[str, Callable[[Program, Counts, bool], PassResult]] = {
    "common subexpressions": lambda program, *_: common_subexpressions(program),
    "split concat": lambda program, *_: split_concat(program),
    "reorder": reorder,
    "aggregate first": aggregate_first,
    "compaction": lambda program, counts, _: compact(program, counts),
}
REWRITES = (*_BEFORE_GRADIENTS, "recompute")
"""The rewrites by name, in the order in which they run; each can be switched off."""

_CHEAP = BINARY | {"scale", "shift", "reciprocal", "relu", "leaky_relu", "leaky_relu_slope"}
_MAX_FEATURES = 16  # of a row; longer rows cost as much to compute as to read


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

    def without_seeds(self, seeds: Collection[str]) -> OptimizedProgram:
        """Return the program for a loss that does not use some outputs, given by their seeds.

        Its forward is the same, and its backward reads no value that this one's does not.
        """
        program, wrt = drop_seeds(self.program, self.wrt, seeds)
        num_forward = max(self.forward) + 1
        assert program.nodes[:num_forward] == self.program.nodes[:num_forward]
        return dataclasses.replace(self, program=program, wrt=wrt)


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
    program, decisions = traced, []
    for name, rewrite in _BEFORE_GRADIENTS.items():
        if name not in without:
            program, found = rewrite(program, counts, "compaction" not in without)
            decisions += found
    num_outputs = len(program.outputs)
    program, reached = differentiate(program, wrt)
    if "common subexpressions" not in without:
        # Of the backward only: the forward's have been decided, and are not mentioned again.
        program, _ = common_subexpressions(program)
    optimized = OptimizedProgram(
        traced, program, num_outputs, reached, (), frozenset(without), counts
    )
    if "recompute" not in without:
        program, found = recompute(program, optimized.forward, optimized.kept, counts)
        decisions += found
    return dataclasses.replace(optimized, program=program, decisions=tuple(decisions))


def recompute(
    program: Program, forward: Collection[int], kept: Collection[int], counts: Counts
) -> PassResult:
    """Compute values of the forward again for the backward, where that leaves less to keep.

    `forward` are the values that the outputs need, `kept` those of them that the backward reads.
    """
    nodes = program.nodes
    keeping, again, decisions = set(kept), set(), []
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        if position not in keeping or node.op not in _CHEAP:
            continue
        if math.prod(node.shape) > _MAX_FEATURES or position in program.outputs:
            continue
        read = {find_source(program, operand) for operand in node.operands}
        new = {at for at in read - keeping if nodes[at].op not in LEAVES}
        num_new = sum(_count_numbers(program, at, counts) for at in new)
        num_saved = _count_numbers(program, position, counts)
        applies = num_new < num_saved
        if applies:
            again.add(position)
            keeping.remove(position)
            keeping |= new
        reason = f"{num_new:,} numbers kept in its place, {num_saved:,} saved"
        decisions.append(Decision("recompute", applies, node.op, reason, node.where))
    return _recompute_values(program, forward, again), decisions


def _count_numbers(program: Program, position: int, counts: Counts) -> int:
    node = program.nodes[position]
    return counts.rows(node.space) * math.prod(node.shape)


def _recompute_values(
    program: Program, forward: Collection[int], again: Collection[int]
) -> Program:
    rewriter, nodes = Rewriter(program, "recompute"), program.nodes
    copies: dict[int, int] = {}

    def copy(position: int) -> int:
        """Return the position at which the backward reads a value."""
        if position not in copies:
            node = nodes[position]
            is_copied = position in again or (
                node.op in READS and find_source(program, position) in again
            )
            copies[position] = (
                rewriter.builder.copy(node, [copy(operand) for operand in node.operands])
                if is_copied
                else rewriter.place[position]
            )
        return copies[position]

    def rewrite(_: Rewriter, position: int) -> int | None:
        if position in forward:
            return None
        node = nodes[position]
        return rewriter.builder.copy(node, [copy(operand) for operand in node.operands])

    return rewriter.run(rewrite)[0]
