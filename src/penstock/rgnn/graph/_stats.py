"""Statistics of a graph that decide how a program is laid out on it."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.tables import report_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphStats:
    """The counts that decide how a program is laid out on a graph."""

    num_nodes: int
    num_edges: int
    num_relations: int
    num_node_types: int
    num_src_pairs: int
    """Unique (source, relation)."""
    num_dst_pairs: int
    """Unique (destination, relation)."""
    num_edges_of_relation: tuple[int, ...]
    num_src_pairs_of_relation: tuple[int, ...]
    num_dst_pairs_of_relation: tuple[int, ...]

    @property
    def src_ratio(self) -> float:
        """Unique (source, relation) per edge; 1 for a graph without edges."""
        return self.num_src_pairs / self.num_edges if self.num_edges else 1.0

    @property
    def dst_ratio(self) -> float:
        """Unique (destination, relation) per edge; 1 for a graph without edges."""
        return self.num_dst_pairs / self.num_edges if self.num_edges else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the ratios as plain data, for JSON."""
        ratios = {"src_ratio": self.src_ratio, "dst_ratio": self.dst_ratio}
        return dataclasses.asdict(self) | ratios

    def __str__(self) -> str:
        sizes = sorted(self.num_edges_of_relation)
        rows: list[tuple[str, object]] = [
            ("num_nodes", self.num_nodes),
            ("num_node_types", self.num_node_types),
            ("num_edges", self.num_edges),
            ("unique (source, relation)", self.num_src_pairs),
            ("unique (destination, relation)", self.num_dst_pairs),
            ("(source, relation) / edges", self.src_ratio),
            ("(destination, relation) / edges", self.dst_ratio),
            ("num_relations", self.num_relations),
            ("relations without edges", sizes.count(0)),
            ("edges in the smallest relation", sizes[0] if sizes else 0),
            ("edges in the median relation", sizes[len(sizes) // 2] if sizes else 0),
            ("edges in the largest relation", sizes[-1] if sizes else 0),
        ]
        return report_table(rows, title="penstock.rgnn.Graph")
