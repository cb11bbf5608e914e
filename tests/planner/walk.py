"""The least bytes that an order moves, found by walking through all states of memory.

Written apart from the planners: no lives and no gaps, only what is where before each operator.
"""

import itertools
import math

from penstock.graph import StepGraph


def walked_traffic(graph: StepGraph, order: tuple[int, ...], device_bytes: int) -> float:
    """Return the least bytes of a step that ends as it begins; infinity if there is none."""
    walk = _Walk(graph, order, device_bytes)
    return min((walk.from_state(state) for state in walk.beginnings()), default=math.inf)


class _Walk:
    """A state: storages on the device, and those whose present content lies below as well."""

    def __init__(self, graph: StepGraph, order: tuple[int, ...], device_bytes: int) -> None:
        self.graph, self.order = graph, order
        workspace_bytes = max(operator.workspace_bytes for operator in graph.operators)
        self.capacity = device_bytes - workspace_bytes
        of = graph.storage_of_value
        self.sizes = [storage.num_bytes for storage in graph.storages]
        used = {of[v] for operator in graph.operators for v in operator.needs}
        here = [i for i, size in enumerate(self.sizes) if size]
        storages = graph.storages
        self.persistent = [i for i in here if storages[i].persistent and i in used]
        self.constant = {i for i in self.persistent if storages[i].initial == storages[i].final}
        self.given = {
            i for i in here if not storages[i].persistent and storages[i].initial is not None
        } & used
        self.kept = {
            i for i in here if not storages[i].persistent and storages[i].final is not None
        }
        self.last_use: dict[int, int] = {}
        for position, index in enumerate(order):
            operator = graph.operators[index]
            for value in operator.needs + operator.makes:
                self.last_use[of[value]] = position

    def beginnings(self):
        """Where persistent storages may be when a step begins."""
        options = [
            [(i, True, True), (i, False, True)] + [(i, True, False)] * (i not in self.constant)
            for i in self.persistent
        ]
        for choice in itertools.product(*options):
            on = frozenset(i for i, there, _ in choice if there)
            yield on, frozenset(i for i, _, below in choice if below)

    def from_state(self, begin) -> float:
        on, below = begin
        costs = {(on | self.given, below): 0}
        for position in range(len(self.order)):
            after: dict = {}
            for state, cost in costs.items():
                for reached, more in self.run(position, *state):
                    after[reached] = min(after.get(reached, math.inf), cost + more)
            costs = after
        least = math.inf
        for (on, below), cost in costs.items():
            mine = frozenset(on & set(self.persistent)), frozenset(below & set(self.persistent))
            # What is on the device may be written, or given up, when the step ends.
            for lost in _subsets(mine[0] - begin[0]):
                for written in _subsets(mine[0] - mine[1]):
                    if lost <= mine[1] | written:
                        end = mine[0] - lost, mine[1] | written
                        if end[0] == begin[0] and begin[1] <= end[1]:
                            bytes_written = sum(self.sizes[i] for i in written)
                            least = min(least, cost + bytes_written)
        return least

    def run(self, position: int, on, below):
        """All states after the operator at a position, with the bytes that move before it."""
        graph, of = self.graph, self.graph.storage_of_value
        operator = graph.operators[self.order[position]]
        needed = {of[v] for v in operator.needs if graph.num_bytes(v)}
        created = {of[v] for v in operator.creates if graph.num_bytes(v)}
        changed = {of[v] for v, _ in operator.mutates}
        pinned = needed | (self.given if position == 0 else set())
        if position == len(self.order) - 1:
            pinned |= {i for i in self.kept if i in on | below}
        arriving = pinned - on
        if not arriving <= below:
            return
        cost_in = sum(self.sizes[i] for i in arriving)
        pairs = [
            (of[read], of[new])
            for read, new in operator.may_overwrite
            if graph.num_bytes(read) == graph.num_bytes(new) > 0
        ]
        fresh = self.given if position == 0 else set()
        needed_later = {
            *self.persistent,
            *self.kept,
            *(i for i, last in self.last_use.items() if last > position),
        }
        for left in _subsets(on - pinned):
            for handed in _matchings(pairs):
                away = {read for read, _ in handed}
                if away & fresh & needed_later:
                    continue
                if position == len(self.order) - 1 and away & self.kept:
                    continue
                written = (left | away & needed_later) - below
                during = (on | pinned | created) - left - away
                if sum(self.sizes[i] for i in during) > self.capacity:
                    continue
                more = cost_in + sum(self.sizes[i] for i in written)
                now = (below | written) - changed
                yield (frozenset(during & needed_later), frozenset(now & needed_later)), more


def _subsets(items):
    items = sorted(items)
    for count in range(len(items) + 1):
        yield from map(set, itertools.combinations(items, count))


def _matchings(pairs):
    """Sets of pairs that have no member in common."""
    for count in range(len(pairs) + 1):
        for chosen in itertools.combinations(sorted(set(pairs)), count):
            if len({a for a, _ in chosen}) == len({b for _, b in chosen}) == count:
                yield chosen
