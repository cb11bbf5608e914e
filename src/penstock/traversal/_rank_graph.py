"""A graph over several ranks: each has the lists of the nodes that it owns, and no others.

A rank numbers the nodes that it knows by itself: first its own, in rising order of their ids, then
its halo, the nodes of other ranks in its lists. The halo stands owner by owner, so that what is
sent about it is a few consecutive parts, and each owner knows where in its own nodes these are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.memory.pages import trim_heap
from penstock.tables import Report
from penstock.traversal._exchange import Exchange, find_group
from penstock.traversal._graph import CSRGraph, Flow
from penstock.traversal._lists import (
    check_bounds,
    find_lists,
    in_memory,
    list_places,
    narrow,
    read_entries,
)
from penstock.traversal._own_lists import read_own_lists
from penstock.traversal._ownership import MOST_RANKS, Split, compare_ranks, find_ownership
from penstock.traversal._send_lists import SendLists, cut_parts
from penstock.unified import UnifiedTensor

_BLOCK_ENTRIES = 2**15
_BLOCK_NODES = 2**14
_BLOCK_ROWS = 2**13  # that one rank sends another at once
# A block has at most this part of a rank's entries, so that all is near 1/ranks; many have room for
# more blocks that are worth a call.
_WIDEST_PART, _WIDEST_OF_MANY = 16, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankGraphReport(Report, title="penstock.traversal.RankGraph"):
    """The account of a rank's part of a graph, and of the exchanges that were made with it."""

    rank: int
    """Number of the rank."""
    num_ranks: int
    """Ranks."""
    num_nodes: int
    """Nodes that the rank owns."""
    num_edges: int
    """Entries of their lists."""
    num_halo: int
    """Nodes of other ranks in these lists, each once: the rank's part of the cut."""
    graph_bytes: int
    """Bytes of the lists, of ids and of what is known of other ranks; zero for lists that the graph
    itself has, in one process."""
    num_messages: dict[str, int]
    """Nodes about which the rank has told others, by the kind of message."""
    sent_bytes: dict[str, int]
    """Bytes of these messages."""


class RankGraph:
    """The part of a graph that belongs to one rank of a process group.

    All ranks make it from the same graph, and then call the same functions in the same order:
    `bfs`, `connected_components`, `pagerank`, `khop`, `infer_layers`. The results for a rank's
    nodes are on that rank. From lists in files a rank reads those of its nodes only.

    Example:
        >>> graph = CSRGraph([0, 1, 2, 3], [1, 2, 0])
        >>> part = RankGraph(graph)  # in one process: all of it
        >>> part.nodes.tolist(), part.num_halo
        ([0, 1, 2], 0)

    Args:
        graph: The whole graph, the same on all ranks; best in files, as each process that has it in
            memory has all of it there.
        split: Owners of the nodes: "random", by a hash of their ids, which divides lists of every
            length alike; "contiguous", ranges of ids, where ids near each other are neighbours; or
            "cluster", for which one rank reads the graph three times, to keep neighbours together.
            Or a tensor of ranks of shape (num_nodes,), as METIS gives it, the same on all ranks.
        group: The ranks, with gloo; None: all of `torch.distributed`, or this process alone where
            there are none.
        seed: Seed of "random".

    Attributes:
        num_nodes: Nodes of the whole graph.
        num_edges: Edges of the whole graph.
        flow: Direction of messages along the edges, as the graph's.
        num_own: Nodes that the rank owns.
        num_halo: Nodes of other ranks in its lists.
        exchange: The ranks, and the bytes that were sent.

    Raises:
        RankError: Another rank has ended, or does not answer.
        TypeError: `graph` is no `CSRGraph`, or `split` has no integers.
        ValueError: `split` is something else, the group has no gloo, or the ranks' graphs differ
            in size or in sampled entries.
    """

    def __init__(
        self,
        graph: CSRGraph,
        *,
        split: Split | Tensor = "random",
        group: distributed.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(graph, CSRGraph):
            raise TypeError(f"graph: expected a CSRGraph, got {type(graph).__name__}")
        self._become(graph, Exchange(find_group(group)), split, seed)

    @classmethod
    def whole(cls, graph: CSRGraph) -> RankGraph:
        """Return all of a graph as the part of a single rank, also where there are others."""
        part = cls.__new__(cls)
        part._become(graph, Exchange(None), "contiguous", 0)
        return part

    def _become(self, graph: CSRGraph, exchange: Exchange, split: Any, seed: int) -> None:
        self.num_nodes, self.num_edges = graph.num_nodes, graph.num_edges
        self.flow: Flow = graph.flow
        self.exchange = exchange
        self._is_whole = exchange.num_ranks == 1
        self._halo_counts = [0] * exchange.num_ranks
        empty = torch.empty(0, dtype=torch.int32, device="cpu")
        self._halo_ids: Tensor | None = None
        self._send = SendLists(empty, self._halo_counts, 0)
        self._longest_part = 0  # of the cut, between any two ranks
        if exchange.num_ranks > MOST_RANKS:
            raise ValueError(f"group: expected up to {MOST_RANKS} ranks, got {exchange.num_ranks}")
        self._owners = find_ownership(graph, split, exchange, seed)
        if self._is_whole:
            self._own, self.num_own = empty, graph.num_nodes
            self._indptr, self._indices = graph.indptr, graph.indices
        else:
            compare_ranks(graph, exchange, self._owners)
            self._own = self._owners.nodes_of(exchange.rank)
            self.num_own = len(self._own)
            trim_heap()
            self._indptr, self._indices = read_own_lists(graph, self._own)
            trim_heap()
            self._find_halo()
            trim_heap()  # what this took is more than what stays
        self.num_halo = sum(self._halo_counts)
        self._has_file = any(in_memory(each) is None for each in (self._indptr, self._indices))

    def _find_halo(self) -> None:
        """Find the nodes of other ranks in the lists, number all, and tell the owners."""
        is_known = torch.zeros(self.num_nodes, dtype=torch.bool, device="cpu")
        for block in self._indices.split(_BLOCK_ENTRIES):
            is_known[block.long()] = True
        for block in self._own.split(_BLOCK_ENTRIES):
            is_known[block.long()] = False
        ranks = range(self.exchange.num_ranks)
        counts = torch.zeros(len(ranks), dtype=torch.int64, device="cpu")
        for _, owners in self._iter_marked(is_known):
            counts += torch.bincount(owners, minlength=len(ranks))
        self._halo_counts = counts.tolist()
        halo = self._own.new_empty(sum(self._halo_counts))
        parts = list(halo.split(self._halo_counts))
        starts = [0] * len(ranks)
        for nodes, owners in self._iter_marked(is_known):
            for rank in ranks:
                some = nodes[owners == rank]
                parts[rank][starts[rank] : starts[rank] + len(some)] = some
                starts[rank] += len(some)
        del is_known
        self._number_entries(parts)
        del parts
        trim_heap()
        self._trade_places(halo)

    def _iter_marked(self, is_known: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the marked nodes in blocks, and their owners."""
        for begin, block in _split_places(is_known):
            nodes = begin + block.nonzero().flatten()
            yield nodes, self._owners.owner_of(nodes)

    def _number_entries(self, halo: list[Tensor]) -> None:
        """Write the numbers of nodes in place of their ids, with the halo's ids by owner."""
        parts = [*halo]
        parts[self.exchange.rank] = self._own
        starts = list(itertools.accumulate(self._halo_counts, initial=self.num_own))
        starts[self.exchange.rank] = 0
        for block in self._indices.split(_BLOCK_ENTRIES):
            owners = self._owners.owner_of(block.long())
            for rank, part in enumerate(parts):
                at = (owners == rank).nonzero().flatten()
                block[at] = (torch.searchsorted(part, block[at]) + starts[rank]).to(block.dtype)

    def _trade_places(self, halo: Tensor) -> None:
        """Tell owners the ids of the halo; keep what others ask for here as places of own nodes."""
        counts = self.exchange.trade_counts(self._halo_counts)
        positions = torch.empty(sum(counts), dtype=torch.int32, device="cpu")
        (self._longest_part,) = self.exchange.largest(max([0, *counts, *self._halo_counts]))
        for begin in range(0, self._longest_part, _BLOCK_ROWS):
            theirs, asked = cut_parts(self._halo_counts, begin, _BLOCK_ROWS)
            ours, told = cut_parts(counts, begin, _BLOCK_ROWS)
            ids = self.exchange.trade(halo[theirs], asked, told, "halo ids")
            positions[ours] = torch.searchsorted(self._own, ids, out_int32=True)
        self._send = SendLists(positions, counts, self.num_own)

    @property
    def nodes(self) -> Tensor:
        """Ids of the nodes that the rank owns, int64 of shape (num_own,), rising."""
        return torch.arange(self.num_nodes, device="cpu") if self._is_whole else self._own.long()

    @property
    def num_bytes(self) -> int:
        """Bytes that the rank has for the graph; see `RankGraphReport.graph_bytes`."""
        tensors = [self._own] if self._halo_ids is None else [self._own, self._halo_ids]
        if not self._is_whole:
            tensors += [self._indptr, self._indices]
        return sum(each.nbytes for each in tensors) + self._owners.num_bytes + self._send.num_bytes

    def report(self) -> RankGraphReport:
        """Return the account of the part, and of all exchanges so far."""
        return RankGraphReport(
            rank=self.exchange.rank,
            num_ranks=self.exchange.num_ranks,
            num_nodes=self.num_own,
            num_edges=len(self._indices),
            num_halo=self.num_halo,
            graph_bytes=self.num_bytes,
            num_messages=dict(self.exchange.num_messages),
            sent_bytes=dict(self.exchange.sent_bytes),
        )

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all nodes on every rank, in the order of their ids.

        Args:
            values: Values of the rank's nodes, of shape (num_own, *row), as results are: a tensor
                or a table, whose rows are read.

        Raises:
            RankError: Another rank has ended, or does not answer.
            TypeError: `values` is no tensor.
            ValueError: `values` has another shape, or another one or another dtype on some ranks.
        """
        if not isinstance(values, Tensor):
            raise TypeError(f"values: expected a tensor or a table, got {type(values).__name__}")
        if not values.dim() or len(values) != self.num_own:
            raise ValueError(
                f"values: expected one for each of the rank's {self.num_own} nodes, got shape "
                f"{tuple(values.shape)}"
            )
        if isinstance(values, UnifiedTensor):  # the result has all rows in memory, and more
            values = values.gather_rows(torch.arange(self.num_own, device="cpu")).cpu()
        exchange, ranks = self.exchange, self.exchange.num_ranks
        if not exchange.agree(values.dtype, tuple(values.shape[1:])):
            own = f"rank {exchange.rank} has {tuple(values.shape)} of {values.dtype}"
            raise ValueError(f"values: ranks have rows of different shapes or dtypes; {own}")
        counts = exchange.trade_counts([self.num_own] * ranks)
        sent = [self.num_own] * ranks
        rest = [1] * (values.dim() - 1)
        ids = exchange.trade(self.nodes.repeat(ranks), sent, counts, "gathered ids")
        rows = exchange.trade(values.repeat(ranks, *rest), sent, counts, "gathered values")
        out = values.new_empty((self.num_nodes, *values.shape[1:]))
        out[ids] = rows
        return out

    # -------------------------------------------------------------- lists

    def read_own(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the lists of consecutive own nodes: their lengths, and their entries by number.

        The entries are int32 or int64, in the graph's memory where they are in memory.
        """
        offsets = self._read_offsets(begin, end).long()
        entries = _read_range(self._indices, int(offsets[0]), int(offsets[-1]))
        return offsets.diff(), self._check(entries)

    def split_own(self, most_entries: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield ranges of own nodes whose lists have a number of entries at most, or one node.

        Args:
            most_entries: Entries; by default few, and a small part of the rank's.
        """
        most = self.block_entries if most_entries is None else most_entries
        for first in range(0, self.num_own, _BLOCK_NODES):
            last = min(first + _BLOCK_NODES, self.num_own)
            offsets, begin = self._read_offsets(first, last), 0
            while begin < last - first:
                end = int(torch.searchsorted(offsets, offsets[begin] + most, right=True)) - 1
                end = max(end, begin + 1)
                yield first + begin, first + end
                begin = end

    def read_lists(self, positions: Tensor) -> Iterator[Tensor]:
        """Yield the entries of the lists of own nodes, by number, in blocks."""
        most = self.block_entries
        for part in positions.split(_BLOCK_NODES) if len(positions) else ():
            both = self._read_bounds(part)
            ends = (both[1] - both[0]).cumsum(0)
            cuts = (
                torch.searchsorted(
                    ends, torch.arange(most, max(int(ends[-1]), most), most, device="cpu")
                )
                + 1
            )
            bounds = sorted({0, *cuts.tolist(), len(part)})
            for begin, end in itertools.pairwise(bounds):
                starts, degrees = both[0, begin:end], both[1, begin:end] - both[0, begin:end]
                yield self._check(read_entries(self._indices, list_places(starts, degrees)))

    def count_entries(self, positions: Tensor) -> Tensor:
        """Return the lengths of the lists of own nodes."""
        return self._read_bounds(positions).diff(dim=0)[0]

    def count_range(self, begin: int, end: int) -> int:
        """Return the entries of the lists of consecutive own nodes."""
        first, last = read_entries(self._indptr, torch.tensor([begin, end], device="cpu")).tolist()
        return last - first

    def read_list(self, position: int, most: int) -> Tensor:
        """Return the first entries of one own node's list, by number, as int64."""
        begin, end = self._read_offsets(position, position + 1).tolist()
        return self._check(_read_range(self._indices, begin, min(end, begin + most))).long()

    def owners_of(self, places: Tensor) -> Tensor:
        """Return the own nodes that have some entries, by the places of these in all lists."""
        return find_lists(self._indptr, places)

    @property
    def block_entries(self) -> int:
        """Entries that are read at once."""
        count = len(self._indices)
        most = max(count // _WIDEST_OF_MANY, _BLOCK_ENTRIES // 4)
        return min(_BLOCK_ENTRIES, most, max(count // _WIDEST_PART, 256))

    def _read_offsets(self, begin: int, end: int) -> Tensor:
        """Return the offsets of consecutive own nodes; raise for those that fall."""
        offsets = _read_range(self._indptr, begin, end + 1)
        if self._has_file:
            nodes = torch.arange(begin, end, device="cpu")
            check_bounds(offsets[:-1], offsets[1:], nodes, len(self._indices))
        return offsets

    def _read_bounds(self, positions: Tensor) -> Tensor:
        """Return where the lists of own nodes begin, and where they end."""
        both = read_entries(self._indptr, torch.stack([positions, positions + 1]))
        if self._has_file:
            check_bounds(both[0], both[1], positions, len(self._indices))
        return both

    def _check(self, entries: Tensor) -> Tensor:
        """Return entries of a list; raise for one that is no node, as in a damaged file.

        Those in memory were looked at when the graph was made.
        """
        if not self._has_file:
            return entries
        wrong = (entries < 0) | (entries >= self.num_own + self.num_halo)
        if wrong.any():
            raise ValueError(
                f"indices: names node {int(entries[wrong][0])}, but the graph has "
                f"{self.num_nodes} nodes"
            )
        return entries

    def position_of(self, nodes: Tensor) -> Tensor:
        """Return the position among the rank's own nodes of nodes that it owns."""
        return nodes if self._is_whole else torch.searchsorted(self._own, nodes)

    def id_of(self, numbers: Tensor) -> Tensor:
        """Return the ids of nodes that the rank knows, by number; of the halo after
        `find_halo_ids` only.
        """
        if self._is_whole:
            return numbers
        ids = torch.empty_like(numbers)
        own = numbers < self.num_own
        ids[own] = self._own[numbers[own]].long()
        if not own.all():
            assert self._halo_ids is not None
            ids[~own] = self._halo_ids[numbers[~own] - self.num_own].long()
        return ids

    def find_halo_ids(self) -> None:
        """Get the ids of the halo from their owners, where they are not there; all ranks call.

        Only the ends of lists that leave the graph, and rows by id, need them.
        """
        if self._halo_ids is None and not self._is_whole:
            self._halo_ids = self.pull_halo(self._own, "halo ids again")

    # ---------------------------------------------------------- exchanges

    def send_to_owners(
        self, nodes: Tensor, kind: str
    ) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Send ids of any nodes to their owners.

        Returns:
            The ids that arrived here; the order in which `nodes` were sent; the numbers of those
            that were sent to each rank, and that arrived from each.
        """
        owners = self._owners.owner_of(nodes)
        order = owners.argsort(stable=True)
        sent = torch.bincount(owners, minlength=self.exchange.num_ranks).tolist()
        received = self.exchange.trade_counts(sent)
        ids = narrow(nodes[order], self.num_nodes)
        return self.exchange.trade(ids, sent, received, kind).long(), order, sent, received

    def tell_owners(self, halo: Tensor, kind: str) -> Tensor:
        """Tell the owners of some nodes of the halo; return the own positions that arrive here.

        Args:
            halo: Places in the halo, int64, rising.
            kind: Kind of message.
        """
        ends = torch.tensor(self._halo_counts, device="cpu").cumsum(0)
        bounds = torch.searchsorted(halo, ends)
        sent = bounds.diff(prepend=bounds.new_zeros(1)).tolist()
        received = self.exchange.trade_counts(sent)
        # 4 bytes: a place in the part of the halo that both ranks know.
        starts = (ends - torch.tensor(self._halo_counts, device="cpu")).repeat_interleave(
            torch.tensor(sent, device="cpu")
        )
        arrived = self.exchange.trade((halo - starts).int(), sent, received, kind)
        parts = enumerate(arrived.split(received))
        return torch.cat([self._send.select(rank, places) for rank, places in parts])

    def pull_halo(self, own: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
        """Return rows of the halo, which their owners send: one message for each node of the cut.

        Args:
            own: Rows of the rank's own nodes.
            kind: Kind of message.
            out: Memory for the rows, or None.
        """
        if out is None:
            out = own.new_empty((self.num_halo, *own.shape[1:]))
        for positions, sent, places, received in self.split_halo():
            out[places] = self.exchange.trade(own[positions], sent, received, kind)
        return out

    def split_halo(
        self, most: int = _BLOCK_ROWS
    ) -> Iterator[tuple[Tensor, list[int], Tensor, list[int]]]:
        """Yield parts of the cut for exchanges of rows, the same number on all ranks.

        Args:
            most: Rows from one rank to another in each.

        Yields:
            Own positions to send, and how many to each rank; places in the halo of what arrives,
            and how many from each.
        """
        for begin in range(0, self._longest_part, most):
            ours = [
                self._send.read(rank, min(begin, count), min(begin + most, count))
                for rank, count in enumerate(self._send.counts)
            ]
            places, received = cut_parts(self._halo_counts, begin, most)
            yield torch.cat(ours), [len(each) for each in ours], places, received

    def push_halo(self, halo: Tensor, own: Tensor, kind: str) -> None:
        """Send values of the halo to the owners, which add them to their own in place.

        Args:
            halo: Values of the halo, one for each node.
            own: Values of the rank's own nodes.
            kind: Kind of message.
        """
        for positions, received, places, sent in self.split_halo():
            found = self.exchange.trade(halo[places], sent, received, kind)
            own.index_add_(0, positions, found)


def as_rank_graph(graph: Any) -> RankGraph:
    """Return the argument `graph` of a function: a rank's part, or all of a graph as one."""
    if isinstance(graph, RankGraph):
        return graph
    if isinstance(graph, CSRGraph):
        return RankGraph.whole(graph)
    raise TypeError(f"graph: expected a CSRGraph or a RankGraph, got {type(graph).__name__}")


def _split_places(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of values, and where they begin."""
    for begin in range(0, len(values), _BLOCK_ENTRIES):
        yield begin, values[begin : begin + _BLOCK_ENTRIES]


def _read_range(values: Tensor, begin: int, end: int) -> Tensor:
    """Return consecutive entries of a list."""
    found = in_memory(values)
    return (
        read_entries(values, torch.arange(begin, end, device="cpu"))
        if found is None
        else found[begin:end]
    )
