"""Common subexpressions: what is computed twice from the same is computed once."""

from __future__ import annotations

from penstock.rgnn.ir import Program, ProgramBuilder
from penstock.rgnn.passes._decision import Decision, PassResult


def common_subexpressions(program: Program) -> PassResult:
    """Let equal nodes be one, and drop what nothing needs."""
    builder = ProgramBuilder(share=True)
    place: list[int] = []
    decisions = []
    for node in program.nodes:
        num_before = len(builder.nodes)
        place.append(builder.copy(node, [place[operand] for operand in node.operands]))
        # Reads cost nothing by themselves and need no mention.
        if len(builder.nodes) == num_before and node.op not in ("gather", "reshape"):
            first = builder.nodes[place[-1]].where
            decisions.append(
                Decision(
                    "common subexpressions",
                    True,
                    node.op,
                    f"computed already by {first}",
                    node.where,
                )
            )
    return PassResult(builder.program(place[out] for out in program.outputs), tuple(decisions))
