"""PageRank by power iteration: owners have the ranks of nodes, and exchange those of the cut."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import Tensor

from penstock.errors import NoConvergenceError
from penstock.memory.pages import trim_heap
from penstock.traversal._graph import CSRGraph
from penstock.traversal._rank_graph import RankGraph, as_rank_graph
from penstock.units import parse_count

_KIND = "pagerank"


def pagerank(
    graph: CSRGraph | RankGraph,
    *,
    damping: float = 0.85,
    tol: float = 1e-10,
    max_iterations: int = 200,
) -> Tensor:
    """Return the PageRank of each node, from the sources of edges to their targets.

    The rank of a node without outgoing edges goes to all nodes alike. Over ranks each iteration
    moves 8 bytes for each node of the cut.

    Example:
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 0]])
        >>> [round(each, 4) for each in pagerank(CSRGraph.from_edges(edges, 4)).tolist()]
        [0.3368, 0.3238, 0.3019, 0.0375]

    Args:
        graph: The graph, or this rank's part of it; all ranks call. An edge that is there several
            times counts as often.
        damping: Share of a node's rank that goes along its edges, from 0 to 1, which is excluded.
        tol: Sum over the nodes of the last change, at which the iteration ends.
        max_iterations: Iterations at most.

    Returns:
        float64 of shape (num_nodes,), for a `RankGraph` of shape (num_own,) in the order of
        `graph.nodes`; the sum over all nodes is 1.

    Raises:
        NoConvergenceError: The change is still above `tol`; the error's `values` are the last ones.
        RankError: Another rank has ended, or does not answer.
        TypeError: `graph` is something else, or a number is none.
        ValueError: A number makes no sense, ranks were given different ones, or the graph is
            damaged.
    """
    part = as_rank_graph(graph)
    _check_numbers(damping, tol, max_iterations)
    if not part.exchange.agree(float(damping), float(tol), int(max_iterations)):
        raise ValueError(
            "damping, tol, max_iterations: ranks were given different numbers; rank "
            f"{part.exchange.rank} has {damping}, {tol} and {max_iterations}; give all the same"
        )
    iteration = _Iteration.of(part)
    values = torch.full(
        (part.num_own,), 1 / max(part.num_nodes, 1), dtype=torch.float64, device="cpu"
    )
    change = 0.0
    for _ in range(max_iterations):
        # r'(v) = (1 - d) / n + d (sum_{u -> v} r(u) / deg(u) + sum_{deg(u) = 0} r(u) / n)
        dangling = iteration.spread(values)
        constant = (1 - damping + damping * dangling) / max(part.num_nodes, 1)
        change = 0.0
        for begin, end in part.split_own():
            flowing = iteration.gather(begin, end).mul(damping).add_(constant)
            change += float((flowing - values[begin:end]).abs_().sum())
            values[begin:end] = flowing
        change = part.exchange.sum(change)
        if change <= tol:
            del iteration
            trim_heap()
            return values
    raise NoConvergenceError(
        f"pagerank changes by {change:.3g} after {max_iterations} iterations, and tol={tol:g}: "
        "raise max_iterations or tol, or take a smaller damping",
        values=values,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Iteration:
    """A graph with the numbers of edges that leave the rank's nodes."""

    part: RankGraph
    num_leaving: Tensor
    """Integers of shape (num_own,), of 16 bits where these suffice."""
    known: Tensor
    """float64 of shape (num_own + num_halo,): what flows along each edge of a node, or to it."""

    @classmethod
    def of(cls, part: RankGraph) -> _Iteration:
        """Count the edges that leave each node."""
        if part.flow == "target_to_source":  # the lists themselves are the edges that leave
            leaving = torch.zeros(part.num_own, dtype=torch.int32, device="cpu")
            for begin, end in part.split_own():
                leaving[begin:end] = part.read_own(begin, end)[0]
            return cls._make(part, leaving)
        counts = torch.zeros(part.num_own + part.num_halo, dtype=torch.int32, device="cpu")
        for begin, end in part.split_own():
            entries = part.read_own(begin, end)[1]
            counts.index_add_(0, entries, counts.new_ones(1).expand(len(entries)))
        leaving = counts[: part.num_own].clone()
        part.push_halo(counts[part.num_own :], leaving, "degrees")
        del counts
        return cls._make(part, leaving)

    @classmethod
    def _make(cls, part: RankGraph, leaving: Tensor) -> _Iteration:
        most = int(leaving.max()) if len(leaving) else 0
        if most <= torch.iinfo(torch.int16).max:
            leaving = leaving.to(torch.int16)
        trim_heap()  # of the counts
        known = torch.empty(part.num_own + part.num_halo, dtype=torch.float64, device="cpu")
        return cls(part, leaving, known)

    def spread(self, values: Tensor) -> float:
        """Let values flow along the edges; return those of nodes without edges, summed."""
        part, known = self.part, self.known
        is_dangling = self.num_leaving == 0
        dangling = part.exchange.sum(float(values[is_dangling].sum()))
        if part.flow == "source_to_target":  # the lists have the sources: their values are pulled
            for begin, end in part.split_own():
                along = values[begin:end] / self.num_leaving[begin:end]
                known[begin:end] = along.masked_fill_(is_dangling[begin:end], 0)
            part.pull_halo(known[: part.num_own], _KIND, out=known[part.num_own :])
            return dangling
        known.zero_()
        for begin, end in part.split_own():
            degrees, entries = part.read_own(begin, end)
            along = values[begin:end] / self.num_leaving[begin:end].clamp(min=1)
            known.index_add_(0, entries, along.repeat_interleave(degrees))
        part.push_halo(known[part.num_own :], known[: part.num_own], _KIND)
        return dangling

    def gather(self, begin: int, end: int) -> Tensor:
        """Return the sums of what has flowed to consecutive own nodes."""
        if self.part.flow == "target_to_source":
            return self.known[begin:end]
        degrees, entries = self.part.read_own(begin, end)
        flowing = self.known.index_select(0, entries)
        return torch.segment_reduce(flowing, "sum", lengths=degrees, initial=0)


def _check_numbers(damping: Any, tol: Any, max_iterations: Any) -> None:
    for name, value, parse in (
        ("damping", damping, operator.pos),
        ("tol", tol, operator.pos),
    ):
        try:
            float(parse(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}={value!r}: expected a number") from error
    if not 0 <= damping < 1:
        raise ValueError(f"damping={damping!r}: expected a number from 0 to 1, without 1")
    if not (math.isfinite(tol) and tol > 0):
        raise ValueError(f"tol={tol!r}: expected a number above 0")
    parse_count(max_iterations, name="max_iterations", least=1)
