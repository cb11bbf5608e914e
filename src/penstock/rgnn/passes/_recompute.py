"""Recomputation: a cheap value that only the backward still needs is recomputed, not kept.

A score of an edge is often made of one number of its source and one of its destination, of which
there are fewer. It is then computed again in the backward from those, and no number per edge is
kept between the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from penstock.rgnn.ir import BINARY, LEAVES, READS, Program, ProgramBuilder, find_source
from penstock.rgnn.passes._decision import Decision, PassResult
from penstock.rgnn.spaces import Counts

_NAME = "recompute"
_CHEAP = BINARY | {"scale", "shift", "reciprocal", "relu", "leaky_relu", "leaky_relu_slope"}
_MAX_FEATURES = 16  # of a row; longer rows cost as much to compute as to read


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
        decisions.append(Decision(_NAME, applies, node.op, reason, node.where))
    return _recompute_values(program, forward, again), decisions


def _count_numbers(program: Program, position: int, counts: Counts) -> int:
    node = program.nodes[position]
    return counts.rows(node.space) * math.prod(node.shape)


def _recompute_values(
    program: Program, forward: Collection[int], again: Collection[int]
) -> Program:
    """Return the program with some values of the forward recomputed in the backward."""
    builder, nodes = ProgramBuilder(), program.nodes
    place: list[int] = []
    copies: dict[int, int] = {}

    def copy(position: int) -> int:
        """Return the position at which the backward reads a value."""
        if position not in copies:
            node = nodes[position]
            is_copied = position in again or (
                node.op in READS and find_source(program, position) in again
            )
            copies[position] = place[position]
            if is_copied:
                copies[position] = builder.copy(node, [copy(o) for o in node.operands])
        return copies[position]

    for position, node in enumerate(nodes):
        is_of_forward = position in forward
        operands = [place[o] if is_of_forward else copy(o) for o in node.operands]
        place.append(builder.copy(node, operands))
    return builder.program(place[output] for output in program.outputs)
