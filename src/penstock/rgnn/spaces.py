"""Spaces of rows that values of a relational program have, and the maps between them.

Every value is a tensor with one row per element of a *space*: per edge, per node, per unique
(source, relation), and so on. Between spaces there are maps that give each row of the one a row of
the other: an edge has one source, one destination, one relation. To read along a map is a gather,
to add up along it is a sum, and the two are each other's transpose. The whole compiler is written
in these few words: compaction computes a value in a smaller space and gathers it, aggregate-first
sums in two steps, and differentiation swaps gathers and sums.
"""

from __future__ import annotations

import dataclasses
import enum
import functools


class Space(enum.Enum):
    """A set of rows: edges, nodes, pairs, types, or the single one."""

    EDGE = "edge"
    SRC_PAIR = "(src, relation)"
    DST_PAIR = "(dst, relation)"
    NODE = "node"
    RELATION = "relation"
    NODE_TYPE = "node type"
    ONE = "one"  # a single row: an untyped weight

    __hash__ = object.__hash__  # there is one object of each; an Enum hashes its name every time

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class RowMap:
    """A function from the rows of one space to the rows of another."""

    name: str
    rows: Space
    into: Space

    def __repr__(self) -> str:
        return self.name


EDGE_SRC = RowMap("src", Space.EDGE, Space.NODE)
EDGE_DST = RowMap("dst", Space.EDGE, Space.NODE)
EDGE_TYPE = RowMap("type", Space.EDGE, Space.RELATION)
EDGE_SRC_PAIR = RowMap("src_pair", Space.EDGE, Space.SRC_PAIR)
EDGE_DST_PAIR = RowMap("dst_pair", Space.EDGE, Space.DST_PAIR)
SRC_PAIR_SRC = RowMap("src_pair.src", Space.SRC_PAIR, Space.NODE)
SRC_PAIR_TYPE = RowMap("src_pair.type", Space.SRC_PAIR, Space.RELATION)
DST_PAIR_DST = RowMap("dst_pair.dst", Space.DST_PAIR, Space.NODE)
DST_PAIR_TYPE = RowMap("dst_pair.type", Space.DST_PAIR, Space.RELATION)
NODE_TYPE_OF = RowMap("node_type", Space.NODE, Space.NODE_TYPE)
# Only where every relation has one source type and one destination type: canonical edge types.
RELATION_SRC_TYPE = RowMap("type.src_type", Space.RELATION, Space.NODE_TYPE)
RELATION_DST_TYPE = RowMap("type.dst_type", Space.RELATION, Space.NODE_TYPE)


@functools.cache
def to_one(space: Space) -> RowMap:
    """Return the map that sends every row of `space` to the single row of `Space.ONE`."""
    return RowMap(f"{space.name.lower()}.one", space, Space.ONE)


@functools.cache
def identity(space: Space) -> RowMap:
    """Return the map that sends every row of `space` to itself."""
    return RowMap(f"{space.name.lower()}.self", space, space)


_SORTED = frozenset({EDGE_TYPE, EDGE_DST_PAIR, SRC_PAIR_TYPE, DST_PAIR_TYPE})


def is_sorted(row_map: RowMap) -> bool:
    """Return whether the rows of one target lie next to each other, in every graph."""
    return row_map in _SORTED or row_map.into is Space.ONE


# (whole, first step): second step
_FACTORS = {
    (EDGE_SRC, EDGE_SRC_PAIR): SRC_PAIR_SRC,
    (EDGE_TYPE, EDGE_SRC_PAIR): SRC_PAIR_TYPE,
    (EDGE_DST, EDGE_DST_PAIR): DST_PAIR_DST,
    (EDGE_TYPE, EDGE_DST_PAIR): DST_PAIR_TYPE,
}


def factor(whole: RowMap, through: RowMap) -> RowMap | None:
    """Return the map `rest` with `rest(through(row)) == whole(row)` for every row, or None.

    Example:
        >>> factor(EDGE_SRC, through=EDGE_SRC_PAIR), factor(EDGE_DST, through=EDGE_SRC_PAIR)
        (src_pair.src, None)

    Args:
        whole: A map that is to be taken in two steps.
        through: The first step; a map from the same rows.

    Returns:
        The second step, or None where `through` forgets what `whole` needs.
    """
    assert whole.rows is through.rows
    if whole == through:
        return identity(through.into)
    if whole.into is Space.ONE:
        return to_one(through.into)
    if through == identity(through.rows):
        return whole
    return _FACTORS.get((whole, through))


class Coordinate(enum.Enum):
    """A coordinate of a row; a value that depends on fewer of them needs fewer rows."""

    SRC = "src"
    DST = "dst"
    TYPE = "type"
    EDGE = "edge"
    NODE = "node"
    NODE_TYPE = "node type"

    def __repr__(self) -> str:
        return self.name


_COORDINATES = {
    Space.EDGE: frozenset({Coordinate.EDGE, Coordinate.SRC, Coordinate.DST, Coordinate.TYPE}),
    Space.SRC_PAIR: frozenset({Coordinate.SRC, Coordinate.TYPE}),
    Space.DST_PAIR: frozenset({Coordinate.DST, Coordinate.TYPE}),
    Space.NODE: frozenset({Coordinate.NODE}),
    Space.RELATION: frozenset({Coordinate.TYPE}),
    Space.NODE_TYPE: frozenset({Coordinate.NODE_TYPE}),
    Space.ONE: frozenset(),
}
_COORDINATES_OF_MAP = {
    EDGE_SRC: frozenset({Coordinate.SRC}),
    EDGE_DST: frozenset({Coordinate.DST}),
    SRC_PAIR_SRC: frozenset({Coordinate.SRC}),
    DST_PAIR_DST: frozenset({Coordinate.DST}),
    RELATION_SRC_TYPE: frozenset({Coordinate.TYPE}),
    RELATION_DST_TYPE: frozenset({Coordinate.TYPE}),
}


def coordinates(row_map: RowMap) -> frozenset[Coordinate]:
    """Return the coordinates of a row of `row_map.rows` that decide its target.

    Example:
        >>> sorted(c.name for c in coordinates(EDGE_SRC_PAIR))
        ['SRC', 'TYPE']
    """
    if row_map in _COORDINATES_OF_MAP:
        return _COORDINATES_OF_MAP[row_map]
    return _COORDINATES[row_map.into]


COUNT_OF = {
    Space.EDGE: "num_edges",
    Space.SRC_PAIR: "num_src_pairs",
    Space.DST_PAIR: "num_dst_pairs",
    Space.NODE: "num_nodes",
    Space.RELATION: "num_relations",
    Space.NODE_TYPE: "num_node_types",
}
"""The names of the numbers of rows, of counts and of graphs, by space."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Rows in each space of a graph, and what else of it the compiler's decisions need."""

    num_nodes: int
    num_edges: int
    num_relations: int
    num_node_types: int
    num_src_pairs: int
    num_dst_pairs: int
    is_canonical: bool
    """True if a relation decides the node types of both its ends."""

    def rows(self, space: Space) -> int:
        """Return the number of rows of a value in `space`."""
        return 1 if space is Space.ONE else getattr(self, COUNT_OF[space])
