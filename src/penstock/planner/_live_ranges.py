"""Live ranges of values in an order of operators, and the intervals in which they are resident.

Positions count on beyond the end of the step: position p of the next step is p + N. A value that
one step leaves to the next has one live range across the end of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.graph import StepGraph, Storage


class Hole(NamedTuple):
    """The part of a live range between two uses, in which the value may be absent."""

    begin: int  # position of the use before it
    end: int  # position of the use after it

    @property
    def positions(self) -> range:
        """Positions at which the value is not used; there may be none."""
        return range(self.begin + 1, self.end)


class LiveRange(NamedTuple):
    """A value from its definition to its last use."""

    value: int  # index of the value, by its name in the step that defines it
    # Positions in order; the first is that of the definition, or of any use if no step changes the
    # value.
    uses: tuple[int, ...]
    end: int  # boundary at which its place is free, or is reused in place
    # Whether no step changes it: a copy below the device never becomes stale, and the last use is
    # the first one of the next step.
    is_constant: bool = False
    made_by: int = -1  # operator that defines it; -1 if it is given, or constant

    @property
    def holes(self) -> list[Hole]:
        """One between any two uses that follow each other."""
        return [Hole(begin, end) for begin, end in itertools.pairwise(self.uses)]


class ResidentInterval(NamedTuple):
    """A value on the device, at an address that is not said."""

    value: int  # index of the value, by its name in the step in which the interval starts
    start: int  # first boundary, as of `Placement`
    end: int  # last boundary, exclusive


def occupied_bytes(
    start: npt.ArrayLike, end: npt.ArrayLike, num_bytes: npt.ArrayLike, num_positions: int
) -> np.ndarray:
    """Return the bytes that intervals take at each position of a step; all are arrays or lists.

    Those that go on in the next step take them at its first positions too, up to a whole step.
    """
    start, end, num_bytes = (np.asarray(each, np.int64) for each in (start, end, num_bytes))
    change = np.zeros(2 * num_positions + 1, np.int64)
    np.add.at(change, start, num_bytes)
    np.subtract.at(change, np.minimum(end, start + num_positions), num_bytes)
    return np.cumsum(change)[:-1].reshape(2, num_positions).sum(0)


def columns_of(
    intervals: Sequence[tuple[int, int, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ends and bytes of intervals, for `occupied_bytes`."""
    start, end, num_bytes = np.array(intervals, np.int64).reshape(-1, 3).T
    return start, end, num_bytes


def live_ranges(
    graph: StepGraph, order: Sequence[int], *, may_grow: bool = False
) -> list[LiveRange]:
    """Find the live ranges of all values that have bytes and are used, in the order of the values.

    Args:
        graph: The step.
        order: Operators by position; a second run defines its results anew.
        may_grow: Whether other operators may still be inserted, so that something may run after
            the last one of `order`: results of the step are then used at boundary N.
    """
    accesses = _ValueAccesses(graph, order)
    found: list[LiveRange] = []
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        if not storage.num_bytes:
            continue
        reads = accesses.reads.get(value, [])
        if storage.persistent and storage.initial == storage.final:
            if reads:
                end = reads[0] + len(order)
                uses = (*dict.fromkeys(reads), end)
                found.append(LiveRange(value, uses, end, is_constant=True))
        elif not (storage.persistent and value == storage.initial):
            # The initial value of a persistent storage belongs to the final one of the step before.
            is_given = value == storage.initial and (reads or value in accesses.changes)
            starts = [*([0] if is_given else []), *accesses.definitions.get(value, ()), None]
            for start, following in itertools.pairwise(starts):
                assert start is not None
                made_by = -1 if is_given else order[start]
                uses, end = accesses.uses(value, storage, start, following, may_grow=may_grow)
                found.append(LiveRange(value, uses, end, made_by=made_by))
    return found


class _ValueAccesses:
    """Positions at which the values of a graph are read, defined and changed in an order."""

    def __init__(self, graph: StepGraph, order: Sequence[int]) -> None:
        self.num_positions = len(order)
        self.reads: dict[int, list[int]] = {}
        self.definitions: dict[int, list[int]] = {}
        self.changes: dict[int, int] = {}  # of values that become others in place
        seen: set[int] = set()
        for position, index in enumerate(order):
            operator = graph.operators[index]
            # A second run with `recompute_args` leaves alone what the first one has changed.
            only_creates = index in seen and operator.recompute_args is not None
            seen.add(index)
            for value in operator.reads:
                self.reads.setdefault(value, []).append(position)
            for value in operator.creates:
                self.definitions.setdefault(value, []).append(position)
            for old, new in () if only_creates else operator.mutates:
                self.changes[old] = position
                self.definitions.setdefault(new, []).append(position)

    def uses(
        self, value: int, storage: Storage, start: int, following: int | None, *, may_grow: bool
    ) -> tuple[tuple[int, ...], int]:
        """Return the uses from a definition to the next one of the value, and the end."""
        num_positions = self.num_positions
        stop = num_positions if following is None else following
        uses = {start, *(use for use in self.reads.get(value, ()) if start <= use < stop)}
        end = self.changes.get(value, -1)
        if start <= end < stop:
            return tuple(sorted({*uses, end})), end
        if following is None and storage.final == value:
            if not storage.persistent or storage.initial is None:
                uses.add(num_positions if may_grow else num_positions - 1)
            else:  # the next step uses it by the name of its initial value
                uses |= {use + num_positions for use in self.reads.get(storage.initial, ())}
                if storage.initial in self.changes:
                    end = self.changes[storage.initial] + num_positions
                    return tuple(sorted({*uses, end})), end
        end = max(uses) + 1
        return tuple(sorted(uses)), end if storage.persistent else min(end, num_positions)
