"""Ranks in levels, and the bytes that a rank receives where a tensor changes its placement.

Ranks form a mesh of levels, the outermost first. At each level a tensor is split along one of its
axes, replicated, or held as partial sums; an axis that several levels split has a digit for each.
Of a tensor of B bytes, with the share N that a rank needs and the share K of it that it holds,

    received = B (N - K),   N = prod over levels that need a split of 1/k,
                            K = N * prod over levels that hold another split of 1/k,

which is (k-1)/k B of an all-gather and (k-1)/k B/k of an all-to-all over k ranks. Partial sums take
(k-1)/k of what they add up where the result is split (reduce-scatter), and twice that where it is
not (all-reduce). Where several levels add up and leave the result whole, inner ones scatter first
and gather last, so that outer ones exchange a part: twice (k-1)/k in all, of k ranks of all levels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from penstock.memory import MachineProfile

REPLICATED = -1
PARTIAL = -2

Placement = tuple[int, ...]
"""At each level an axis, `REPLICATED` or `PARTIAL`."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Levels of ranks.

    Attributes:
        sizes: Ranks of each level, the outermost first.
        weights: For each level the seconds of a byte, relative to a link within a node: costs of
            different meshes are in one unit.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return prod(self.sizes)


class Move(NamedTuple):
    """A collective that changes the placement of a tensor.

    Attributes:
        level: Level of the mesh whose ranks take part.
        kind: `"all_gather"`, `"all_to_all"`, `"reduce_scatter"`, `"all_reduce"` or `"halo"`.
        num_bytes: Bytes that a rank receives.
    """

    level: int
    kind: str
    num_bytes: float


def make_mesh(sizes: tuple[int, ...], machine: MachineProfile) -> Mesh:
    """Return the mesh of some levels on a machine: levels beyond a node take its network."""
    unit = link_rate(machine, is_within_node=True)
    weights = []
    inner = prod(sizes)
    for size in sizes:
        is_within_node = inner <= machine.devices_per_node
        weights.append(unit / link_rate(machine, is_within_node=is_within_node))
        inner //= size
    return Mesh(sizes, tuple(weights))


def link_rate(machine: MachineProfile, *, is_within_node: bool) -> float:
    """Return the bytes per second that a device receives from others."""
    link = machine.peer if is_within_node else machine.network or machine.peer
    return (link or machine.memcpy).bytes_per_second


def level_byte_seconds(mesh: Mesh, machine: MachineProfile) -> tuple[float, ...]:
    """Return for each level of a mesh the seconds that a byte takes."""
    unit = link_rate(machine, is_within_node=True)
    return tuple(each / unit for each in mesh.weights)


@functools.cache
def joint_levels(extent: int, sizes: tuple[int, ...]) -> frozenset[int]:
    """Return the levels that each have a digit of an axis, the outermost first."""
    found, rest = set(), extent
    for level, size in enumerate(sizes):
        if rest % size == 0:
            found.add(level)
            rest //= size
    return frozenset(found)


def can_split(extent: int, levels: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether an axis can be split by all these levels.

    Example:
        >>> can_split(8, (0, 1), (4, 2)), can_split(4, (0, 1), (4, 2)), can_split(4, (1,), (4, 2))
        (True, False, True)
    """
    return extent % prod(sizes[level] for level in levels) == 0


@functools.cache
def share(placement: Placement, sizes: tuple[int, ...]) -> float:
    """Return the share of a tensor that a rank holds."""
    return 1 / prod(size for axis, size in zip(placement, sizes, strict=False) if axis >= 0)


def find_moves(
    num_bytes: int,
    held: Placement,
    need: Placement,
    *,
    mesh: Mesh,
    extents: tuple[int, ...],
    blocked: frozenset[int] = frozenset(),
) -> tuple[Move, ...] | None:
    """Return the collectives that turn one placement into another.

    Args:
        num_bytes: Bytes of the whole tensor.
        held: Placement that it has.
        need: Placement that it is to have.
        mesh: Levels of ranks; placements may be of the first levels alone.
        extents: Of the tensor's axes.
        blocked: Axes along which the tensor is an index or a range of its storage: ranks that hold
            others hold nothing of it.

    Returns:
        The collectives in order; None where there is no way: a split tensor is no partial sum.
    """
    if held == need:
        return ()
    is_wanted = PARTIAL in need
    if is_wanted and any(b == PARTIAL and a >= 0 for a, b in zip(held, need, strict=True)):
        return None
    moves, held = _add_up(num_bytes, held, need, mesh, extents, blocked)
    sizes = mesh.sizes
    own = {axis for axis in held if axis >= 0}
    if not own:
        return tuple(moves)
    mixed = {axis for axis in own if axis in blocked or _is_mixed(axis, held, need, extents, sizes)}
    changed = [i for i, axis in enumerate(held) if axis >= 0 and (axis != need[i] or axis in mixed)]
    needed = share(need, sizes)

    def kept(first: int) -> float:
        """Return the share that ranks hold of what they need, once levels before one are done."""
        found = needed
        for level in changed:
            if level >= first:
                if held[level] in mixed:
                    return 0.0
                found /= sizes[level]
        return found

    for level in changed:  # the outermost first: slow links then bring the smallest pieces
        received = kept(level + 1) - kept(level)
        if received > 0:
            kind = "all_to_all" if need[level] >= 0 else "all_gather"
            moves.append(Move(level, kind, num_bytes * received))
    return tuple(moves)


def _is_mixed(
    axis: int, held: Placement, need: Placement, extents: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Return whether an axis is split in two ways of which some rank's pieces do not overlap.

    Levels that each have a digit keep it whatever others do; the pieces of other sets of levels lie
    in order of these.
    """
    if axis not in need:
        return False
    before = {level for level, each in enumerate(held) if each == axis}
    after = {level for level, each in enumerate(need) if each == axis}
    return before != after and not before | after <= joint_levels(extents[axis], sizes)


def _add_up(
    num_bytes: int,
    held: Placement,
    need: Placement,
    mesh: Mesh,
    extents: tuple[int, ...],
    blocked: frozenset[int],
) -> tuple[list[Move], Placement]:
    """Return the collectives that add up partial sums, and the placement after them."""
    if PARTIAL not in held:
        return [], held
    summed = [i for i, axis in enumerate(held) if axis == PARTIAL and need[i] != PARTIAL]
    if not summed:
        return [], held
    now, moves, sizes = [*held], [], mesh.sizes

    def fits(level: int) -> bool:
        axis = need[level]
        if axis < 0 or axis in blocked:
            return False
        levels = tuple(i for i, each in enumerate(now) if each == axis or i == level)
        return can_split(extents[axis], levels, sizes)

    for level, axis in enumerate(held):
        if axis == REPLICATED and fits(level):
            now[level] = need[level]  # a rank adds up its own piece alone
    for level in reversed(summed):
        received = num_bytes * share(tuple(now), sizes) * (sizes[level] - 1) / sizes[level]
        if fits(level):
            moves.append(Move(level, "reduce_scatter", received))
            now[level] = need[level]
    rest = [level for level in reversed(summed) if now[level] == PARTIAL]
    pieces = round(1 / share(tuple(now), sizes))
    moves += _reduce_all(num_bytes / pieces, prod(extents) // pieces, rest, sizes)
    for level in rest:
        now[level] = REPLICATED
    return moves, tuple(now)


def _reduce_all(
    num_bytes: float, num_elements: int, levels: list[int], sizes: tuple[int, ...]
) -> list[Move]:
    """Return the collectives that add a piece up and leave it whole; levels the innermost first."""
    inner = find_scattering(num_elements, levels, sizes)
    scattered = []
    for level in inner:
        num_bytes /= sizes[level]
        scattered.append(Move(level, "reduce_scatter", num_bytes * (sizes[level] - 1)))
    reduced = [
        Move(level, "all_reduce", 2 * num_bytes * (sizes[level] - 1) / sizes[level])
        for level in levels[len(inner) :]
    ]
    gathered = [each._replace(kind="all_gather") for each in reversed(scattered)]
    return scattered + reduced + gathered


def find_scattering(num_elements: int, levels: list[int], sizes: tuple[int, ...]) -> list[int]:
    """Return the levels, of those that add up, that scatter first and gather last: all but the
    outermost; none where elements do not divide by their ranks.

    Args:
        num_elements: Of the piece.
        levels: Levels that add up, the innermost first.
        sizes: Ranks of each level.
    """
    inner = levels[:-1]
    return inner if num_elements % prod(sizes[level] for level in inner) == 0 else []
