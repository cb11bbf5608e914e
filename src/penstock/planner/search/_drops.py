"""Families of sets of values that may be worth dropping, from cheap to thorough.

Values that cost little to make again (activation functions, normalisations) are dropped by price:
the time to make them over the time to move them. Whole segments are dropped between narrow places
of the forward pass, where few bytes cross, as checkpointing does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from penstock.graph import Phase, StepGraph
from penstock.planner._live_ranges import occupied_bytes
from penstock.planner.search._recompute import RecomputeChains
from penstock.planner.search._storage_roles import find_roles

_PRICES = (0.03, 0.1, 0.3, 1.0)
_NUM_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


class DropFamilies:
    """Families of sets of storages to drop.

    Args:
        graph: The graph.
        chains: Chains by which its values can be made again.
        operator_seconds: Time of each operator.
        bytes_per_second: Of the links, out and back one after the other.

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

    def by_price(self) -> Iterator[tuple[str, frozenset[int]]]:
        """Yield all storages that cost less to make again than a share of moving them."""
        seen: set[frozenset[int]] = set()
        for limit in _PRICES:
            cheap = frozenset(item for item, price in self.price.items() if price < limit)
            # A value that only the forward pass needs may be kept for those that are made again.
            for name, dropped in (("", cheap), (", saved", cheap & self._saved)):
                if dropped and dropped not in seen:
                    seen.add(dropped)
                    yield f"price<{limit:g}{name}", dropped

    def by_segment(self) -> Iterator[tuple[str, frozenset[int]]]:
        """Yield all storages but those that cross between segments of the forward pass."""
        crossing = self._crossing_bytes()
        num_forward = len(crossing)
        seen: set[frozenset[int]] = set()
        for count in _NUM_SEGMENTS:
            if num_forward < 2 * count:
                continue
            cuts = self._find_narrow_places(crossing, count)
            kept = self._crossing_items(cuts)
            dropped = frozenset(self.made_at) - kept
            if dropped and dropped not in seen:
                seen.add(dropped)
                yield f"segments={count}", dropped

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

    @functools.cached_property
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

    @staticmethod
    def _find_narrow_places(crossing: np.ndarray, count: int) -> list[int]:
        """Return the last place in each of `count` equal parts at which the fewest bytes cross."""
        bounds = np.linspace(0, len(crossing), count + 1).astype(int)
        return [
            int(high - 1 - np.argmin(crossing[low:high][::-1]))
            for low, high in itertools.pairwise(bounds)
            if high > low
        ]

    def _crossing_items(self, cuts: list[int]) -> frozenset[int]:
        items, start, end = self._forward_intervals.T
        # A storage crosses if the first cut after its definition lies before its last use.
        at = np.append(np.sort(cuts), np.iinfo(np.int64).max)
        return frozenset(items[at[np.searchsorted(at, start)] < end].tolist())
