"""Where values would be on the device if nothing ever left, for a fixed order that runs once.

The *life* of a value goes from the operator that makes it to the last that needs it. It consists of
uses and of the *gaps* between them, in which the value may be elsewhere. Positions count on beyond
the end of the step, so that a life of what the next step begins with is one interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph


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


def lives_of(graph: StepGraph, order: Sequence[int], *, again: bool = False) -> Lives:
    """Find the lives of all values.

    Args:
        graph: The step.
        order: Each operator once.
        again: Whether operators may run again, so that something may run after the last of these.
    """
    num_positions = len(order)
    position_of = {operator: position for position, operator in enumerate(order)}
    handed = {old: index for index, o in enumerate(graph.operators) for old, _ in o.mutates}
    lives: list[tuple[int, int, int, int, bool]] = []
    gaps: list[tuple[int, int, int]] = []
    live = np.zeros(num_positions + 1, dtype=np.int64)
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        if not storage.num_bytes:
            continue
        uses = sorted(position_of[consumer] for consumer in graph.consumers[value])
        producer = graph.producers[value]
        constant = storage.persistent and storage.initial == storage.final
        if constant:
            if not uses:
                continue  # it may stay below the device for ever
            uses.append(uses[0] + num_positions)
            born, made_by, end = uses[0], -1, uses[-1]
        else:
            if storage.persistent and value == storage.initial:
                continue  # counted as the value `final` of the step before
            born = 0 if producer is None else position_of[producer]
            made_by = -1 if producer is None else producer
            if producer is None and not uses:
                continue  # given, and nobody looks at it
            over = handed.get(value)
            if storage.final == value:
                if storage.persistent and storage.initial is not None:
                    uses += [
                        position_of[consumer] + num_positions
                        for consumer in graph.consumers[storage.initial]
                    ]
                    over = handed.get(storage.initial)
                else:
                    # There when the step ends; what comes in at last is there a position before.
                    uses.append(num_positions if again else num_positions - 1)
            uses = sorted({born, *uses})
            # What is handed over counts as the new value at the operator that does it.
            end = uses[-1] if over is not None else uses[-1] + 1
            if not storage.persistent:
                end = min(end, num_positions)
        for begin, after in itertools.pairwise(uses):
            if after - begin >= 2:
                gaps.append((len(lives), begin, after))
        lives.append((value, storage.num_bytes, born, made_by, constant))
        _add(live, born, end, storage.num_bytes)
    used = _used_bytes(graph, order)
    value, num_bytes, born, made_by, clean = (
        (np.array(c) for c in zip(*lives, strict=True))
        if (lives)
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
        used_bytes=used - saved,
    )


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


def _used_bytes(graph: StepGraph, order: Sequence[int]) -> np.ndarray:
    used = np.zeros(len(order), dtype=np.int64)
    for position, index in enumerate(order):
        operator = graph.operators[index]
        used[position] = sum(map(graph.num_bytes, {*operator.reads, *operator.makes}))
    return used


def saved_bytes(graph: StepGraph, index: int) -> int:
    """Bytes that results may at most share with operands (`Operator.may_overwrite`)."""
    shared: dict[int, int] = {}
    for read, created in graph.operators[index].may_overwrite:
        both = min(graph.num_bytes(read), graph.num_bytes(created))
        shared[created] = max(shared.get(created, 0), both)
    return sum(shared.values())
