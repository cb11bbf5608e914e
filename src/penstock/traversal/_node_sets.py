"""Sets of nodes within some hops, where the edges among them are not needed.

A search for nodes alone may change its direction: it looks at few of the edges that a closure has.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from penstock.errors import CapacityError
from penstock.traversal._budget import BudgetExceeded, SearchBudget
from penstock.traversal._graph import CSRGraph
from penstock.traversal._khop import KhopRequest, parse_limit


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeSet:
    """All nodes within some hops of seeds."""

    nodes: Tensor
    """Ids in the graph, int64 of shape (num_nodes,), in the order of `Closure.nodes`."""
    seed_positions: Tensor
    """Position in `nodes` of each seed that was given, int64 of shape (num_seeds,)."""
    num_nodes: tuple[int, ...]
    """Nodes up to each hop, the seeds being hop 0. Those at a distance of h hops are
    `nodes[num_nodes[h - 1]:num_nodes[h]]`."""
    frontier_edges: tuple[int, ...]
    """Edges of the nodes that are new at each hop, from the seeds on."""
    touched_edges: tuple[int, ...]
    """Entries that each hop looked at; fewer than `frontier_edges` where it pulled."""
    pulled: tuple[bool, ...]
    """For each hop, True if it pulled."""
    peak_bytes: int
    """Bytes of all that the search held at once, its result included."""


def khop_nodes(
    graph: CSRGraph,
    seeds: Tensor,
    hops: int,
    *,
    max_bytes: int | str | None = None,
    reverse: CSRGraph | None = None,
) -> NodeSet:
    """Return all nodes within some hops of seeds, hop by hop, without the edges among them.

    Example:
        >>> import torch
        >>> graph = CSRGraph([0, 1, 2, 3], [1, 2, 0])
        >>> found = khop_nodes(graph, torch.tensor([0]), 5)
        >>> found.nodes.tolist(), found.num_nodes
        ([0, 1, 2], (1, 2, 3, 3, 3, 3))

    Args:
        graph: The graph, in memory or in files.
        seeds: Integers of shape (n,), on the CPU or a GPU, where the result then is.
        hops: Hops from a node to its neighbours, 0 or more.
        max_bytes: Bytes that the call holds at once, its result included; see `khop`.
        reverse: The same edges as lists of the other direction, in memory, as `graph.reverse()`
            makes them. A hop whose frontier has more edges than nodes that are not found yet have
            to look at goes from these.

    Raises:
        CapacityError: The search needs more than `max_bytes`.
        Exception: As `khop`.
    """
    request = KhopRequest.of(graph, seeds, hops, False, reverse)
    limit = parse_limit(max_bytes)
    try:
        search = request.search_nodes(SearchBudget(limit))
    except BudgetExceeded:
        needed = request.search_nodes(SearchBudget(None)).budget.peak_bytes
        raise CapacityError(
            f"max_bytes={max_bytes!r}: the nodes within {request.hops} hops of "
            f"{len(request.seeds)} seeds need {needed} bytes at once. Give as many, or fewer seeds."
        ) from None
    return NodeSet(
        nodes=search.nodes,
        seed_positions=search.positions,
        num_nodes=tuple(search.num_nodes),
        frontier_edges=tuple(search.frontier_edges),
        touched_edges=tuple(search.touched_edges),
        pulled=tuple(search.pulled),
        peak_bytes=search.budget.peak_bytes,
    )
