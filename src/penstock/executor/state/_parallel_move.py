"""Parallel move: copies within one memory whose sources and targets overlap, as if made at once."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

_Range = tuple[int, int]


class ByteMove(NamedTuple):
    """Bytes that go from one place to another of the same length, both tensors of bytes."""

    source: torch.Tensor
    target: torch.Tensor


def move_in_parallel(moves: Sequence[ByteMove]) -> None:
    """Carry out moves as if all of them happened at once.

    As register allocators do it: a move whose target holds no source that is still to be moved goes
    first. If the rest forms cycles, the source of one move is copied aside, which breaks its cycle;
    no more memory is taken than that.

    Example:
        >>> memory = torch.arange(4, dtype=torch.uint8)
        >>> low, high = memory[:2], memory[2:]
        >>> move_in_parallel([ByteMove(low, high), ByteMove(high, low)])
        >>> memory.tolist()
        [2, 3, 0, 1]

    Args:
        moves: No two of them with overlapping sources, nor with overlapping targets.
    """
    waiting = {_range_of(move.source): move for move in moves if move.source.numel()}
    while waiting:
        sources = sorted(waiting)
        blocked = {}
        for source, move in waiting.items():
            if _find_blocker(move, sources):
                blocked[source] = move
                continue
            (begin, end), (target_begin, target_end) = source, _range_of(move.target)
            overlaps = begin < target_end and target_begin < end
            move.target.copy_(move.source.clone() if overlaps else move.source)
            del sources[bisect.bisect_left(sources, source)]
        if len(blocked) == len(waiting):
            move = blocked.pop(_find_in_cycle(blocked))
            aside = move.source.clone()
            blocked[_range_of(aside)] = ByteMove(aside, move.target)
        waiting = blocked


def _find_blocker(move: ByteMove, sources: list[_Range]) -> _Range | None:
    """Return another move's source, of sorted ones, that overlaps a move's target."""
    begin, end = _range_of(move.target)
    first = max(bisect.bisect_left(sources, (begin, 0)) - 1, 0)
    last = bisect.bisect_left(sources, (end, 0))
    own = _range_of(move.source)
    return next((each for each in sources[first:last] if each[1] > begin and each != own), None)


def _find_in_cycle(blocked: dict[_Range, ByteMove]) -> _Range:
    """Return the source of a move in a cycle, of moves that are all blocked by each other."""
    sources = sorted(blocked)
    source, seen = sources[0], set()
    while source not in seen:
        seen.add(source)
        blocker = _find_blocker(blocked[source], sources)
        assert blocker is not None
        source = blocker
    return source


def _range_of(tensor: torch.Tensor) -> _Range:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel()
