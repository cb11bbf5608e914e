"""What is where in one order: lives of values, what is away between two uses, and what moves.

A *life* goes from where a value is made to where it is needed last. What a step leaves to the next
one lives on there, so positions count on beyond the end of the step. Whoever decides what is away
when gets the stays and transfers of a plan from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.memory import Link
from penstock.planner._plan import Transfer
from penstock.planner.exact._assemble import Stay


class Life(NamedTuple):
    """A value from where it is made to where it is last used, with the uses in between.

    Attributes:
        value: As the step calls it that makes it.
        uses: Positions; they count on beyond the end of the step.
        end: Boundary at which its place is free, or handed over.
        constant: No step changes it: uses[-1] is uses[0] of the next step.
    """

    value: int
    uses: tuple[int, ...]
    end: int
    constant: bool


class Away(NamedTuple):
    """A life leaves after one of its uses and is away from one boundary to another.

    Attributes:
        life: Index of the life.
        use: Index in its `uses`.
        left: Boundary at which it leaves.
        back: Boundary at which it comes back.
        taker: What the operator of that use writes in its place.
    """

    life: int
    use: int
    left: int
    back: int
    taker: int | None = None


def lives_in(graph: StepGraph, order: Sequence[int]) -> list[Life]:
    """Find the lives of all values that have bytes and are used.

    Args:
        graph: The step.
        order: Operators by position; one that appears again makes what it makes anew.
    """
    num_positions = len(order)
    needs: dict[int, list[int]] = {}
    births: dict[int, list[int]] = {}
    handed: dict[int, int] = {}
    seen: set[int] = set()
    for position, index in enumerate(order):
        operator = graph.operators[index]
        pairs = () if index in seen and operator.recompute_args is not None else operator.mutates
        seen.add(index)
        for value in operator.reads:
            needs.setdefault(value, []).append(position)
        for value in operator.creates:
            births.setdefault(value, []).append(position)
        for old, new in pairs:
            handed[old] = position
            births.setdefault(new, []).append(position)
    lives: list[Life] = []
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        if not storage.num_bytes:
            continue
        uses = sorted(set(needs.get(value, ())))
        if storage.persistent and storage.initial == storage.final:
            if uses:
                uses.append(uses[0] + num_positions)
                lives.append(Life(value, tuple(uses), uses[-1], True))
        elif not (storage.persistent and value == storage.initial):
            given = [0] if value == storage.initial and (uses or value in handed) else []
            for born, gone in itertools.pairwise([*given, *births.get(value, ()), None]):
                assert born is not None
                last = num_positions if gone is None else gone
                mine = [use for use in uses if born < use < last or (born == use and given)]
                end = max([born, *mine]) + 1
                if born <= handed.get(value, -1) < last:
                    end = handed[value]
                    mine.append(end)
                elif gone is None and storage.final == value and storage.persistent:
                    initial = storage.initial
                    assert initial is not None
                    mine += [use + num_positions for use in needs.get(initial, ())]
                    end = handed[initial] + num_positions if initial in handed else mine[-1] + 1
                    mine += [end] if initial in handed else []
                elif gone is None and storage.final == value:
                    mine.append(num_positions - 1)
                    end = num_positions
                lives.append(Life(value, tuple(sorted({born, *mine})), end, False))
    return lives


def last_read(graph: StepGraph, life: Life) -> int | None:
    """Return where a life may give its place to a result because nobody needs it afterwards."""
    is_kept = graph.storages[graph.storage_of_value[life.value]].final == life.value
    return None if is_kept or life.uses[-1] != life.end - 1 else life.end - 1


def live_bytes(graph: StepGraph, num_positions: int, lives: Sequence[Life]) -> np.ndarray:
    """Bytes on the device at each position, if nothing is away."""
    live = np.zeros(num_positions, dtype=np.int64)
    for life in lives:
        for position in range(life.uses[0], life.end):
            live[position % num_positions] += graph.num_bytes(life.value)
    return live


def moves(
    graph: StepGraph, num_positions: int, lives: Sequence[Life], aways: Sequence[Away]
) -> tuple[list[Stay], list[Transfer]]:
    """Say what is on the device when, and what moves between it and the host.

    Args:
        graph: The step.
        num_positions: Of the order.
        lives: All lives in it.
        aways: What is away when; those of one life in the order of its uses.
    """
    stays: list[Stay] = []
    transfers: list[Transfer] = []
    absent: dict[int, list[Away]] = {}
    for away in aways:
        absent.setdefault(away.life, []).append(away)
    for index, life in enumerate(lives):
        num_bytes = graph.num_bytes(life.value)
        storage = graph.storages[graph.storage_of_value[life.value]]

        def named(start: int, value: int, initial: int | None = storage.initial) -> tuple[int, int]:
            """What the step calls it in which the interval begins, and the boundary there."""
            if start < num_positions:
                return value, 0
            assert initial is not None
            return initial, num_positions

        begin, written = life.uses[0], life.constant
        segments: list[tuple[int, int]] = []
        for away in absent.get(index, ()):
            needed = life.uses[away.use + 1]
            left = life.uses[away.use] + 1 if written and away.taker is None else away.left
            if not written:
                out = life.uses[0] + 1  # a copy may be made while the value is still there
                value, shift = named(out, life.value)
                start, end = out - shift, away.left - shift
                transfers.append(Transfer(value, Link.DEVICE_TO_HOST, num_bytes, start, end))
                written = True
            segments.append((begin, left))
            value, shift = named(away.back, life.value)
            start, end = away.back - shift, needed - shift
            transfers.append(Transfer(value, Link.HOST_TO_DEVICE, num_bytes, start, end))
            begin = away.back
        if life.constant and not segments:
            stays.append(Stay(life.value, 0, num_positions))
            continue
        if life.constant:  # the place after the last gap goes on before the first one
            segments[0] = (begin, segments[0][1] + num_positions)
        else:
            segments.append((begin, life.end))
        for start, end in segments:
            value, shift = named(start, life.value)
            stays.append(Stay(value, start - shift, end - shift))
    transfers.sort(key=lambda transfer: (transfer.end, transfer.start))
    return stays, transfers
