"""Compaction: a value that several edges share is computed once, on the rows of what it depends on.

An edge value that depends only on the source and the relation has a row for each unique (source,
relation); one that depends only on the source is a node value. The choice is a map from values to
row maps (the layout), made from the graph's own counts; the program it is made for stays as it is,
and `lay_out` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.rgnn import spaces
from penstock.rgnn.ir import ROWWISE, Program, describe, find_coordinates
from penstock.rgnn.passes._decision import Decision, PassResult, Rewriter
from penstock.rgnn.spaces import Coordinate, Counts, RowMap, Space

CountRows = Callable[[int], int]
"""From a value of a program to the number of rows that it is computed on."""
Layout = Mapping[int, RowMap]
"""For each value that gets fewer rows than its space has: the map to them."""

_CANDIDATES = {
    Space.EDGE: (spaces.EDGE_SRC, spaces.EDGE_DST, spaces.EDGE_SRC_PAIR, spaces.EDGE_DST_PAIR),
    Space.SRC_PAIR: (spaces.SRC_PAIR_SRC,),
    Space.DST_PAIR: (spaces.DST_PAIR_DST,),
}


def choose_rows(program: Program, counts: Counts) -> dict[int, RowMap]:
    """Choose the fewest rows for each value that can be computed on fewer than its space has."""
    depends = find_coordinates(program)
    found = {
        position: _find_best(node.space, depends[position], counts)
        for position, node in enumerate(program.nodes)
        if node.op in ROWWISE
    }
    return {position: best for position, best in found.items() if best is not None}


def make_row_counter(program: Program, counts: Counts, can_compact: bool) -> CountRows:
    """Return a function that returns on how many rows a value is computed, compact if it can be."""
    depends = find_coordinates(program)

    def count_rows(position: int) -> int:
        space = program.nodes[position].space
        if can_compact and not depends[position]:
            return 1
        if can_compact and depends[position] == {Coordinate.TYPE}:
            return counts.num_relations
        best = _find_best(space, depends[position], counts) if can_compact else None
        return counts.rows(space if best is None else best.into)

    return count_rows


def lay_out(program: Program, layout: Layout) -> Program:
    """Return the program that computes each value of `layout` on its rows and gathers it."""

    def rewrite(rewriter: Rewriter, position: int) -> int | None:
        if position not in layout:
            return None
        node, row_map = program.nodes[position], layout[position]
        operands = []
        for operand in node.operands:
            read = rewriter.builder.read(rewriter.place[operand], row_map)
            # What depends on no more than this value does has been laid out on no more rows.
            assert read is not None, (describe(node), row_map)
            operands.append(read)
        compacted = rewriter.builder.add(node.op, *operands, **dict(node.attributes))
        return rewriter.builder.add("gather", compacted, map=row_map)

    return Rewriter(program, "compaction").run(rewrite)[0]


def compact(program: Program, counts: Counts) -> PassResult:
    """Choose rows and lay the program out on them, with a decision for each product."""
    layout = choose_rows(program, counts)
    depends = find_coordinates(program)
    decisions = []
    for position, node in enumerate(program.nodes):
        if node.op not in ("matmul", "dot") or node.space is not Space.EDGE:
            continue
        names = " and ".join(sorted(c.value for c in depends[position])) or "nothing"
        if position in layout:
            space = layout[position].into
            reason = f"{counts.rows(space):,} {space.value} rows for {counts.num_edges:,} edges"
        elif _find_fitting(node.space, depends[position]):
            reason = f"no fewer rows than {counts.num_edges:,} edges"
        else:
            reason = f"it depends on {names}"
        decisions.append(Decision("compaction", position in layout, node.op, reason, node.where))
    return lay_out(program, layout), decisions


def _find_fitting(space: Space, depends: frozenset[Coordinate]) -> list[RowMap]:
    return [m for m in _CANDIDATES.get(space, ()) if depends <= spaces.coordinates(m)]


def _find_best(space: Space, depends: frozenset[Coordinate], counts: Counts) -> RowMap | None:
    """Return the fitting map to the fewest rows, if those are fewer than the space's own."""
    # Of as many rows, those that are told apart by less come first: they need no index of pairs.
    candidates = sorted(
        _find_fitting(space, depends),
        key=lambda m: (counts.rows(m.into), len(spaces.coordinates(m))),
    )
    if candidates and counts.rows(candidates[0].into) < counts.rows(space):
        return candidates[0]
    return None
