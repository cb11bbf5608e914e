"""Moves between places of one memory, where one's new place may be another's old one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

_Range = tuple[int, int]


class Move(NamedTuple):
    """Bytes that go from one place to another.

    Attributes:
        source: Where they are, as a tensor of bytes.
        target: Where they go; of the same length.
    """

    source: torch.Tensor
    target: torch.Tensor


def move_all(moves: Sequence[Move]) -> None:
    """Carry out moves as if all of them happened at once.

    Whatever goes where nobody lies any more goes first. Where all that is left waits for each
    other, in a circle, one of them is copied aside; no more memory is taken than that.

    Example:
        >>> memory = torch.arange(4, dtype=torch.uint8)
        >>> move_all([Move(memory[:2], memory[2:]), Move(memory[2:], memory[:2])])
        >>> memory.tolist()
        [2, 3, 0, 1]

    Args:
        moves: No two of them with overlapping sources, nor with overlapping targets.
    """
    waiting = {_range(move.source): move for move in moves if move.source.numel()}
    while waiting:
        places = sorted(waiting)
        blocked = {}
        for place, move in waiting.items():
            if _in_the_way(move, places):
                blocked[place] = move
                continue
            own = _overlap(move.source, move.target)
            move.target.copy_(move.source.clone() if own else move.source)
            del places[bisect.bisect_left(places, place)]
        if len(blocked) == len(waiting):
            place = _in_a_circle(blocked)
            move = blocked.pop(place)
            aside = move.source.clone()
            blocked[_range(aside)] = Move(aside, move.target)
        waiting = blocked


def _in_the_way(move: Move, places: list[_Range]) -> _Range | None:
    """Somebody else, of the sorted ones, who lies where a move goes."""
    begin, end = _range(move.target)
    at = bisect.bisect_left(places, (begin, 0))
    if at and places[at - 1][1] > begin:
        at -= 1
    own = _range(move.source)
    while at < len(places) and places[at][0] < end:
        if places[at] != own:
            return places[at]
        at += 1
    return None


def _in_a_circle(blocked: dict[_Range, Move]) -> _Range:
    """One of several who wait for each other, where everybody waits for somebody."""
    places = sorted(blocked)
    place, seen = places[0], set()
    while place not in seen:
        seen.add(place)
        found = _in_the_way(blocked[place], places)
        assert found is not None
        place = found
    return place


def _range(tensor: torch.Tensor) -> _Range:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _range(one), _range(other)
    return begin < other_end and other_begin < end
