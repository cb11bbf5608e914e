"""Where values would be on the device if nothing ever left, for a fixed order that runs once.

The *life* of a value goes from the operator that makes it to the last that needs it. It consists of
uses and of the *gaps* between them, in which the value may be elsewhere. Positions count on beyond
the end of the step, so that a life of what the next step begins with is one interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._rates import Rates


@dataclass(frozen=True, kw_only=True)
class Lives:
    """All lives and gaps of an order; arrays have one entry per life or per gap.

    Attributes:
        value: Value of each life: the one that the operator makes, not what the next step calls it.
        num_bytes: Its bytes.
        born: Position of its first use: of the operator that makes it, or of any if no step
            changes it.
        made_by: Operator that makes it; -1 for what is given.
        clean: Whether a copy below the device exists for ever, since no step changes it.
        gap_life: Life of each gap; only gaps with a position inside.
        gap_begin: Position of the use before the gap.
        gap_end: Position of the use after it.
        live_bytes: Per position: bytes on the device while its operator runs, if nothing leaves;
            of what is handed over at once, old and new count once.
        used_bytes: Per position: bytes that its operator needs and makes, likewise.
    """

    value: np.ndarray
    num_bytes: np.ndarray
    born: np.ndarray
    made_by: np.ndarray
    clean: np.ndarray
    gap_life: np.ndarray
    gap_begin: np.ndarray
    gap_end: np.ndarray
    live_bytes: np.ndarray
    used_bytes: np.ndarray

    def evictable_bytes(self) -> np.ndarray:
        """Per position: bytes of the values that are in a gap there."""
        change = np.zeros(len(self.live_bytes) + 1, dtype=np.int64)
        for life, begin, end in zip(self.gap_life, self.gap_begin, self.gap_end, strict=True):
            _add(change, int(begin) + 1, int(end), int(self.num_bytes[life]))
        return np.cumsum(change[:-1])


@dataclass(frozen=True)
class FixedOrder:
    """A step whose operators first run in a given order, in an arena with links.

    Attributes:
        graph: The step.
        lives: Lives and gaps of the order.
        seconds: Time of the operator at each position.
        capacity: Bytes of the arena.
        rates: Of the links.
        again: Time of each operator (by index) if it may run again; None if none may.
    """

    graph: StepGraph
    lives: Lives
    seconds: np.ndarray
    capacity: int
    rates: Rates
    again: np.ndarray | None

    @property
    def compute_seconds(self) -> float:
        """Time of all operators, each once."""
        return float(self.seconds.sum())

    @property
    def excess(self) -> np.ndarray:
        """Per position: bytes that have to be missing from what would be there; may be negative."""
        return self.lives.live_bytes - self.capacity


def lives_of(graph: StepGraph, order: Sequence[int], *, again: bool = False) -> Lives:
    """Find the lives of all values.

    Args:
        graph: The step.
        order: Each operator once.
        again: Whether operators may run again, so that something may run after the last of these.
    """
    num_positions = len(order)
    position_of = {operator: position for position, operator in enumerate(order)}
    handed = {old for operator in graph.operators for old, _ in operator.mutates}
    lives: list[tuple[int, int, int, int, bool]] = []
    gaps: list[tuple[int, int, int]] = []
    live = np.zeros(num_positions + 1, dtype=np.int64)
    for value, storage in enumerate(graph.storage_of_value):
        num_bytes = graph.storages[storage].num_bytes
        life = _life(graph, value, position_of, handed, again=again) if num_bytes else None
        if life is None:
            continue
        for begin, after in itertools.pairwise(life.uses):
            if after - begin >= 2:
                gaps.append((len(lives), begin, after))
        lives.append((value, num_bytes, life.uses[0], life.made_by, life.clean))
        _add(live, life.uses[0], life.end, num_bytes)
    value, num_bytes, born, made_by, clean = (
        (np.array(c) for c in zip(*lives, strict=True))
        if lives
        else (np.zeros(0, dtype=np.int64) for _ in range(5))
    )
    columns = np.array(gaps, dtype=np.int64).reshape(-1, 3)
    saved = np.array([saved_bytes(graph, operator) for operator in order], dtype=np.int64)
    return Lives(
        value=value,
        num_bytes=num_bytes,
        born=born,
        made_by=made_by,
        clean=clean.astype(bool),
        gap_life=columns[:, 0],
        gap_begin=columns[:, 1],
        gap_end=columns[:, 2],
        live_bytes=np.cumsum(live[:-1]) - saved,
        used_bytes=operator_bytes(graph)[list(order)],
    )


class _Life(NamedTuple):
    """Positions of a value's uses, the first and the others, and where it may go after the last."""

    uses: list[int]
    end: int
    made_by: int = -1
    clean: bool = False


def _life(
    graph: StepGraph,
    value: int,
    position_of: Mapping[int, int],
    handed: Collection[int],
    *,
    again: bool,
) -> _Life | None:
    """The life of a value; None if it has none, or that of another name."""
    storage = graph.storages[graph.storage_of_value[value]]
    producer, num_positions = graph.producers[value], len(position_of)
    uses = sorted(position_of[consumer] for consumer in graph.consumers[value])
    if storage.persistent and storage.initial == storage.final:  # no step changes it
        if not uses:
            return None  # it may stay below the device for ever
        end = uses[0] + num_positions
        return _Life([*uses, end], end, clean=True)
    if storage.persistent and value == storage.initial:
        return None  # counted as the value `final` of the step before
    if producer is None and not uses:
        return None  # given, and nobody looks at it
    last = value  # by what name it is last used
    if storage.final == value:
        if storage.persistent and storage.initial is not None:
            last = storage.initial
            uses += [position_of[consumer] + num_positions for consumer in graph.consumers[last]]
        else:
            # There when the step ends; what comes in at last is there a position before.
            uses.append(num_positions if again else num_positions - 1)
    uses = sorted({0 if producer is None else position_of[producer], *uses})
    # What is handed over counts as the new value at the operator that does it.
    end = uses[-1] if last in handed else uses[-1] + 1
    if not storage.persistent:
        end = min(end, num_positions)
    return _Life(uses, end, -1 if producer is None else producer)


def _add(live: np.ndarray, start: int, end: int, num_bytes: int) -> None:
    """Add bytes from a boundary up to another, at most a cycle later, on the cycle."""
    num_positions = len(live) - 1
    if end - start >= num_positions:
        live[0] += num_bytes
        return
    start, end = start % num_positions, end - start + start % num_positions
    live[start] += num_bytes
    if end <= num_positions:
        live[end] -= num_bytes
    else:
        live[0] += num_bytes
        live[end - num_positions] -= num_bytes


def operator_bytes(graph: StepGraph) -> np.ndarray:
    """Return the least bytes that are on the device while each operator runs, in any plan.

    Its operands and its results, as many of these in the place of operands as it allows.
    """
    used = [
        sum(map(graph.num_bytes, {*operator.reads, *operator.makes})) - saved_bytes(graph, index)
        for index, operator in enumerate(graph.operators)
    ]
    return np.array(used, dtype=np.int64)


def saved_bytes(graph: StepGraph, index: int) -> int:
    """Bytes that results may at most share with operands (`Operator.may_overwrite`)."""
    shared: dict[int, int] = {}
    for read, created in graph.operators[index].may_overwrite:
        both = min(graph.num_bytes(read), graph.num_bytes(created))
        shared[created] = max(shared.get(created, 0), both)
    return sum(shared.values())
