"""Sets of values that may be worth dropping, from cheap to thorough: families, and small changes.

Values that cost little to make again (activation functions, normalisations) are dropped by price:
the time to make them over the time to move them. Whole segments are dropped between narrow places
of the forward pass, where few bytes cross, as checkpointing does. Beyond families the choice is one
by place and by single values: a value that an idle link can move need not be made again, and one
that no link has time for may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

import numpy as np

from penstock._lazy import cached_property
from penstock.graph import Phase, StepGraph
from penstock.planner._live_ranges import occupied_bytes
from penstock.planner.search._recompute import RecomputeChains, mark_brief

_PRICES = (0.03, 0.1, 0.3, 1.0)
_NUM_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_NUM_ROUNDS = 3  # operators around a storage that its role looks at, in either direction


class DropFamilies:
    """Families of sets of storages to drop.

    Attributes:
        made_at: For each storage that can be dropped the operator that makes it first.
        price: For each of them the time to make it again over the time to move it.
        group: For each of them the kind of that operator.
        role: For each of them its role (`find_roles`).
    """

    def __init__(
        self,
        graph: StepGraph,
        chains: RecomputeChains,
        operator_seconds: np.ndarray,
        bytes_per_second: float,
    ) -> None:
        self.graph = graph
        self._saved = frozenset(
            graph.storage_of_value[value]
            for operator in graph.operators
            if operator.phase is not Phase.FORWARD
            for value in operator.needs
        )
        self.made_at: dict[int, int] = {}
        self.price: dict[int, float] = {}
        self.group: dict[int, str] = {}
        self.role: dict[int, int] = {}
        roles = find_roles(graph)
        for item, chain in chains.chain_of.items():
            first = graph.operators[chain[0]]
            if first.phase is not Phase.FORWARD:
                continue
            num_bytes = graph.storages[item].num_bytes
            seconds = float(operator_seconds[list(chain)].sum())
            self.made_at[item] = chain[0]
            self.price[item] = seconds / (num_bytes / bytes_per_second)
            self.group[item] = first.target
            self.role[item] = roles[item]

    def by_price(self) -> Iterator[frozenset[int]]:
        """Yield all storages that cost less to make again than a share of moving them."""
        seen: set[frozenset[int]] = set()
        for limit in _PRICES:
            cheap = frozenset(item for item, price in self.price.items() if price < limit)
            # A value that only the forward pass needs may be kept for those that are made again.
            for dropped in (cheap, cheap & self._saved):
                if dropped and dropped not in seen:
                    seen.add(dropped)
                    yield dropped

    def by_segment(self) -> Iterator[frozenset[int]]:
        """Yield all storages but those that cross between segments of the forward pass."""
        crossing = self._crossing_bytes()
        num_forward = len(crossing)
        seen: set[frozenset[int]] = set()
        for count in _NUM_SEGMENTS:
            if num_forward < 2 * count:
                continue
            bounds = np.linspace(0, num_forward, count + 1).astype(int)
            cuts = [  # the last place in each part at which the fewest bytes cross
                int(high - 1 - np.argmin(crossing[low:high][::-1]))
                for low, high in itertools.pairwise(bounds)
            ]
            dropped = frozenset(self.made_at) - self._crossing_items(cuts)
            if dropped and dropped not in seen:
                seen.add(dropped)
                yield dropped

    def groups(self) -> Iterator[frozenset[int]]:
        """Yield the droppable storages by kind of operator, then by role; the largest first."""
        for key_of in (self.group, self.role):
            members: dict[str | int, set[int]] = {}
            for item, key in key_of.items():
                members.setdefault(key, set()).add(item)
            weight = {
                key: sum(self.graph.storages[item].num_bytes for item in items)
                for key, items in members.items()
            }
            for key in sorted(members, key=lambda key: -weight[key]):
                yield frozenset(members[key])

    @cached_property
    def _forward_intervals(self) -> np.ndarray:
        """Columns: storages, their definition, and their last use in the forward pass."""
        graph = self.graph
        uses: dict[int, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            if operator.phase is not Phase.FORWARD:
                continue
            for value in (*operator.needs, *operator.makes):
                uses.setdefault(graph.storage_of_value[value], []).append(index)
        rows = [
            (item, at[0], at[-1])
            for item, at in uses.items()
            if graph.storages[item].initial is None
        ]
        return np.array(rows, np.int64).reshape(-1, 3)

    def _crossing_bytes(self) -> np.ndarray:
        operators = self.graph.operators
        forward = [i for i, operator in enumerate(operators) if operator.phase is Phase.FORWARD]
        items, start, end = self._forward_intervals.T
        num_bytes = np.array([storage.num_bytes for storage in self.graph.storages], np.int64)
        return occupied_bytes(start, end, num_bytes[items], (forward[-1] if forward else 0) + 1)

    def _crossing_items(self, cuts: list[int]) -> frozenset[int]:
        items, start, end = self._forward_intervals.T
        # A storage crosses if the first cut after its definition lies before its last use.
        at = np.append(np.sort(cuts), np.iinfo(np.int64).max)
        return frozenset(items[at[np.searchsorted(at, start)] < end].tolist())


def find_roles(graph: StepGraph) -> list[int]:
    """Find the role of each storage, as numbers from 0 on.

    This is colour refinement (Weisfeiler and Leman 1968) of the graph of operators and storages: a
    storage's colour in the next round is its own with those of the operators that touch it, an
    operator's its kind with the colours of what it touches, in order.
    """
    storage_of = graph.storage_of_value
    touched = [
        tuple(storage_of[value] for value in (*operator.needs, *operator.makes))
        for operator in graph.operators
    ]
    kinds = [(operator.target, operator.phase, len(operator.makes)) for operator in graph.operators]
    users: list[list[int]] = [[] for _ in graph.storages]
    for index, items in enumerate(touched):
        for item in dict.fromkeys(items):
            users[item].append(index)
    colours = _number([(storage.num_bytes, storage.kind) for storage in graph.storages])
    for _ in range(_NUM_ROUNDS):
        of_operator = _number(
            [
                (kind, *(colours[item] for item in items))
                for kind, items in zip(kinds, touched, strict=True)
            ]
        )
        # Each once: a tensor that all layers share has one more user with each of them.
        colours = _number(
            [
                (colour, *sorted({of_operator[index] for index in using}))
                for colour, using in zip(colours, users, strict=True)
            ]
        )
    return colours


def _number(keys: list[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


class DropProposals:
    """A source of random changes."""

    def __init__(self, drops: DropFamilies, random: np.random.Generator) -> None:
        self._random = random
        graph = drops.graph
        items = sorted(drops.made_at, key=lambda item: drops.made_at[item])
        self._items = np.array(items, np.int64)
        self._price = np.array([drops.price[item] for item in items])
        names = sorted({drops.group[item] for item in items})
        self._group = np.array([names.index(drops.group[item]) for item in items], np.int64)
        self._role = np.array([drops.role[item] for item in items], np.int64)
        num_bytes = np.array([graph.storages[item].num_bytes for item in items], np.float64)
        self._weight = num_bytes / num_bytes.sum() if len(items) else num_bytes

    def __len__(self) -> int:
        return len(self._items)

    def propose(self, dropped: frozenset[int]) -> frozenset[int]:
        """Change a choice a little; large values change more often than small ones."""
        random, count = self._random, len(self._items)
        centre = int(random.choice(count, p=self._weight))
        length = int(count ** random.uniform(0, 1))
        begin = max(0, centre - int(random.integers(0, length)))
        chosen = np.zeros(count, bool)
        chosen[begin : begin + length] = True
        kind = random.integers(6)
        if kind == 0:
            chosen &= self._group == self._group[centre]
        elif kind == 1:
            chosen &= self._price <= self._price[centre]
        elif kind == 2:
            chosen &= self._price >= self._price[centre]
        elif kind <= 4:
            chosen &= self._role == self._role[centre]
        members = frozenset(self._items[chosen].tolist())
        # The value in the middle decides the direction.
        item, more = int(self._items[centre]), bool(random.integers(2))
        if item not in dropped:
            return dropped | members | (mark_brief(members) if more else frozenset())
        if ~item in dropped:
            return dropped - mark_brief(members) - (frozenset() if more else members)
        return dropped | mark_brief(members) if more else dropped - members - mark_brief(members)
