"""Lists of a closure's nodes, collected from the ranks that own them, as a graph of their own."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.traversal._graph import CSRGraph, Flow
from penstock.traversal._lists import list_places, narrow
from penstock.traversal._rank_graph import RankGraph
from penstock.units import format_bytes

_ENTRY_BYTES = 8
_NODE_BYTES = 24  # of an id, and of a list's place and length


@dataclasses.dataclass(frozen=True, eq=False)
class CollectedGraph:
    """The closure of some seeds as a graph whose nodes are numbered as their ids rise."""

    ids: Tensor
    """Ids of the nodes, int64 of shape (num_nodes,), rising."""
    graph: CSRGraph
    """Entries of the nodes' lists that are nodes of the closure, in their order."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return self.ids.nbytes + self.graph.num_bytes


def collect_lists(
    part: RankGraph, seeds: Tensor, hops: int, max_bytes: int | None
) -> CollectedGraph:
    """Ask the owners, hop by hop, for the lists of the nodes of a closure; all ranks call.

    The bytes of a hop's entries are known from the lengths of its lists before they are sent. All
    ranks raise where one has no room, and none waits for another.

    Args:
        part: The rank's part of the graph.
        seeds: Ids of the seeds of this rank.
        hops: Hops, the same on all ranks.
        max_bytes: Bytes that the rank may hold meanwhile; None: any number.

    Raises:
        CapacityError: A rank needs more than its `max_bytes`.
        RankError: Another rank has ended, or does not answer.
    """
    _compare_hops(part, hops)
    part.find_halo_ids()
    known = frontier = seeds.unique()
    held_bytes, found = 0, []
    for hop in range(hops + 1):  # once more than hops: for the edges among the last nodes
        asked, order, sent, received = part.send_to_owners(frontier, "khop nodes")
        lists = _OwnLists.of(part, part.position_of(asked))
        degrees = part.exchange.trade(lists.degrees, received, sent, "khop lengths")
        total = int(degrees.sum())
        held_bytes += _NODE_BYTES * len(frontier) + 2 * _ENTRY_BYTES * total
        _agree_on_room(part, held_bytes, max_bytes)
        entries = part.exchange.trade(
            narrow(part.id_of(lists.read(part)), part.num_nodes),
            lists.count_entries(received),
            _sum_parts(degrees, sent),
            "khop entries",
        ).long()
        if hop == hops:
            degrees, entries = _keep_known(degrees, entries, known)
        found.append((frontier[order], degrees, entries))
        if hop < hops:
            before, known = known, torch.cat([known, entries]).unique()
            frontier = known[~torch.isin(known, before, assume_unique=True)]
    return CollectedGraph(known, _join_lists(known, found, part.flow))


@dataclasses.dataclass(frozen=True, eq=False)
class _OwnLists:
    """Lists of own nodes that other ranks ask for, one behind the other."""

    positions: Tensor
    degrees: Tensor

    @classmethod
    def of(cls, part: RankGraph, positions: Tensor) -> _OwnLists:
        return cls(positions, part.count_entries(positions))

    def read(self, part: RankGraph) -> Tensor:
        """Return the entries by number."""
        blocks = [entries.long() for entries in part.read_lists(self.positions)]
        return torch.cat(blocks) if blocks else self.positions[:0]

    def count_entries(self, counts: list[int]) -> list[int]:
        """Return the entries of consecutive parts of the lists."""
        return _sum_parts(self.degrees, counts)


def _sum_parts(values: Tensor, counts: list[int]) -> list[int]:
    return [int(each.sum()) for each in values.split(counts)]


def _compare_hops(part: RankGraph, hops: int) -> None:
    least, most = part.exchange.largest(-hops, hops)
    if -least != most:
        raise ValueError(f"hops={hops}: ranks were given {-least} to {most}; give all the same")


def _agree_on_room(part: RankGraph, held_bytes: int, max_bytes: int | None) -> None:
    """Raise on all ranks if one needs more bytes than it may have."""
    has_room = max_bytes is None or held_bytes <= max_bytes
    (needed,) = part.exchange.largest(-1 if has_room else held_bytes)
    if needed < 0:
        return
    own = "another rank" if has_room else f"rank {part.exchange.rank} (max_bytes={max_bytes})"
    raise CapacityError(
        f"max_bytes: the lists of a closure take {needed} bytes ({format_bytes(needed)}) so far on "
        f"one of the ranks, more than it may have; it is {own}. Give more, or fewer seeds."
    )


def _keep_known(degrees: Tensor, entries: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists without the entries that are not known, and their lengths."""
    kept = torch.isin(entries, known)
    ends = torch.cat([kept.new_zeros(1).long(), kept.cumsum(0)])
    bounds = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    return ends[bounds].diff(), entries[kept]


def _join_lists(known: Tensor, found: list[tuple[Tensor, Tensor, Tensor]], flow: Flow) -> CSRGraph:
    """Return the lists of all nodes, in the order of their ids, with positions for ids."""
    nodes, degrees, entries = (torch.cat(each) for each in zip(*found, strict=True))
    starts = degrees.cumsum(0) - degrees
    order = nodes.argsort()
    places = list_places(starts[order], degrees[order])
    indices = narrow(torch.searchsorted(known, entries[places]), len(known))
    offsets = torch.zeros(len(nodes) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(degrees[order], 0, out=offsets[1:])
    return CSRGraph(offsets, indices, flow=flow)
