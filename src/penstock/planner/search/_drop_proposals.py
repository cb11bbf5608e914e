"""Small changes of the set of dropped values: some of those made in a window of the forward pass.

Families of drops (`_drops.py`) hold all storages of one price or one kind of operator. Beyond them
the choice is one by place and by single values: a value that an idle link can move need not be made
again, and one that no link has time for may be. A change adds or removes the values of a random
window, all, those of one kind or one role, those of a range of prices, or one value; or it has them
made again for each of their uses.
"""

from __future__ import annotations

import numpy as np

from penstock.planner.search._drops import DropFamilies
from penstock.planner.search._recompute import mark_brief


class DropProposals:
    """A source of random changes.

    Args:
        drops: Storages that can be dropped, where they are made, and their prices.
        random: Generator of the changes.
    """

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
