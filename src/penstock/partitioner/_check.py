"""The checker of partitions: counts what each rank holds and needs, index by index.

It shares the axis table with the search, which has tests of its own, and nothing else: which
indices of an axis a rank has is written down as a mask, and bytes are counted from these. Memory is
that of a rank's own step, where it can be written: operator by operator, with all copies.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from penstock.errors import PlanError
from penstock.graph.step_graph import Kind, StepGraph
from penstock.partitioner._partition import Collective, Partition
from penstock.partitioner._rank import find_peak
from penstock.partitioner.axes import GraphAxes, OperatorAxes, Use, find_axes

_WHOLE, _SUM = -1, -2
_SLACK = 1e-6  # of bytes, which are sums of fractions

_Digits = tuple[tuple[int, int], ...]  # levels that split an axis, and a rank's place in each


def check(graph: StepGraph, partition: Partition) -> None:
    """Raise unless a partition fits its graph, its budget and its own figures.

    Example:
        >>> check(graph, penstock.partition(graph, devices=8))  # doctest: +SKIP

    Args:
        graph: The step.
        partition: Its partition.

    Raises:
        PlanError: It breaks a rule: `"graph"` (it is for another), `"placement"` (a split that does
            not divide an axis, partial sums of something that lasts), `"split"` (an operator has no
            such axis), `"exchange"` (collectives that do not bring what ranks lack), `"memory"`
            (the fullest rank needs more than the figure or the budget), `"figures"`.
    """
    if partition.graph_digest != graph.digest:
        raise PlanError("the partition is for another step graph", rule="graph")
    _Checker(graph, partition).run()


class _Checker:
    """One check."""

    def __init__(self, graph: StepGraph, partition: Partition) -> None:
        self.graph = graph
        self.partition = partition
        self.axes: GraphAxes = find_axes(graph)
        self.sizes = partition.mesh
        self.ranks = [*itertools.product(*map(range, partition.mesh))]
        self.collectives: dict[int, list[Collective]] = {}
        for each in partition.collectives:
            self.collectives.setdefault(each.operator, []).append(each)
        self._num_common = functools.cache(self._count_common)
        self._mask = functools.cache(self._find_mask)
        self._received = functools.cache(self._count_received)
        self.placements = [self._read_placement(i) for i in range(len(graph.storages))]

    def run(self) -> None:
        """Check one rule after the other."""
        extra = [self._check_operator(index) for index in range(len(self.graph.operators))]
        counted = self._find_peak(extra)
        written = find_peak(self.graph, self.partition)
        peak = counted if written is None else written
        claimed, budget = self.partition.peak_device_bytes, self.partition.device_bytes
        if peak != claimed:
            raise PlanError(f"the fullest rank needs {peak} bytes, not {claimed}", rule="memory")
        if budget is not None and peak > budget:
            raise PlanError(f"the fullest rank needs {peak} bytes of {budget}", rule="memory")
        total = sum(each.num_bytes for each in self.partition.collectives)
        if round(total) != self.partition.exchanged_bytes:
            raise PlanError(f"collectives move {total:.0f} bytes in all", rule="figures")
        if self.partition.lower_bound_bytes > self.partition.exchanged_bytes:
            raise PlanError("the lower bound is above what is exchanged", rule="figures")

    def _read_placement(self, storage: int) -> tuple[int, ...]:
        """Return the axes of a placement, by the strides that name them."""
        cuts, each = self.axes.cuts[storage], self.graph.storages[storage]
        found = []
        for stride in self.partition.placements[storage]:
            if stride <= 0:
                found.append(_SUM if stride else _WHOLE)
            elif stride not in cuts[:-1]:
                raise PlanError(f"{each.name!r} has no axis of stride {stride}", rule="placement")
            else:
                found.append(cuts.index(stride))
        if len(found) != len(self.sizes):
            raise PlanError(f"{each.name!r} is not placed at every level", rule="placement")
        for axis, extent in enumerate(self.axes.sizes(storage)):
            pieces = math.prod(k for a, k in zip(found, self.sizes, strict=True) if a == axis)
            if extent % pieces:
                raise PlanError(
                    f"an axis of {each.name!r} has {extent} indices, no multiple of {pieces}",
                    rule="placement",
                )
        lasts = each.initial is not None or each.final is not None
        if _SUM in found and (lasts or each.kind not in (Kind.ACTIVATION, Kind.GRADIENT)):
            raise PlanError(f"{each.name!r} lasts, and is no partial sum", rule="placement")
        return tuple(found)

    def _check_operator(self, index: int) -> int:
        """Check an operator's exchange; return the bytes that it needs beside storages."""
        operator, axes = self.graph.operators[index], self.axes.operators[index]
        letters = self.partition.splits[index]
        split = [self._read_letter(operator.name, axes, letter) for letter in letters]
        for axis, extent in enumerate(axes.sizes):
            pieces = math.prod(k for a, k in zip(split, self.sizes, strict=True) if a == axis)
            if extent % pieces:
                raise PlanError(f"{operator.name!r} cannot be split so often", rule="split")
        pieces = math.prod(k for a, k in zip(split, self.sizes, strict=True) if a >= 0)
        extra = math.ceil(operator.workspace_bytes / pieces)
        expected: dict[tuple[int, bool], float] = {}
        for is_result, uses in ((False, axes.inputs), (True, axes.outputs)):
            for use in dict.fromkeys(uses):
                own = tuple(
                    axis if axis < 0 else self._axis_of(use, axis, is_result=is_result)
                    for axis in split
                )
                rest = self.placements[use.storage]
                held, need = (own, rest) if is_result else (rest, own)
                received = self._received(use.storage, use.num_bytes, held, need, use.blocked)
                if received > 0:
                    whole = math.prod(k for a, k in zip(own, self.sizes, strict=True) if a >= 0)
                    extra += math.ceil(use.num_bytes / whole)
                received += self._count_halo(use, split, own)
                key = use.storage, is_result
                expected[key] = expected.get(key, 0.0) + received
        self._compare(index, expected)
        return extra

    def _read_letter(self, name: str, axes: OperatorAxes, letter: str) -> int:
        if letter == "":
            return _WHOLE
        if letter == "+" and axes.is_linear:
            return _SUM
        if letter not in axes.names:
            raise PlanError(f"{name!r} cannot be split along {letter!r}", rule="split")
        return axes.names.index(letter)

    @staticmethod
    def _axis_of(use: Use, axis: int, *, is_result: bool) -> int:
        if is_result and axis in use.sums:
            return _SUM
        found = use.axis_of_loop[axis]
        return _WHOLE if found is None else found

    def _compare(self, index: int, expected: dict[tuple[int, bool], float]) -> None:
        """Compare an operator's collectives with the bytes that its ranks lack."""
        given: dict[tuple[int, bool], float] = dict.fromkeys(expected, 0.0)
        for each in self.collectives.get(index, ()):
            key = self.graph.storage_of_value[each.value], each.is_result
            given[key] = given.get(key, 0.0) + each.num_bytes
        for key, num_bytes in given.items():
            wanted = expected.get(key, 0.0)
            if abs(num_bytes - wanted) > _SLACK * max(1.0, wanted):
                name = self.graph.operators[index].name
                of = self.graph.storages[key[0]].name
                raise PlanError(
                    f"at {name!r} a rank lacks {wanted:.0f} bytes of {of!r}, and collectives bring "
                    f"{num_bytes:.0f}",
                    rule="exchange",
                )

    def _count_common(self, extent: int, one: _Digits, other: _Digits) -> int:
        """Return how many indices of an axis belong to two pieces of it."""
        return int((self._mask(extent, one) & self._mask(extent, other)).sum())

    def _find_mask(self, extent: int, digits: _Digits) -> np.ndarray:
        """Return a mask of the indices of an axis that a rank has."""
        levels = dict(digits)
        with_digit = self._levels_with_digit(extent)
        mask, block = np.ones(extent, dtype=bool), extent
        for level in with_digit if set(levels) <= set(with_digit) else levels:
            block //= self.sizes[level]
            if level not in levels:
                continue
            size, digit = self.sizes[level], levels[level]
            if block and extent % (size * block) == 0:  # the same without divisions
                pieces = mask.reshape(-1, size, block)
                pieces[:, :digit] = pieces[:, digit + 1 :] = False
            else:
                mask &= np.arange(extent) // block % size == digit
        return mask

    def _levels_with_digit(self, extent: int) -> list[int]:
        found = []
        for level, size in enumerate(self.sizes):
            if extent % size == 0:
                found.append(level)
                extent //= size
        return found

    def _count_received(
        self,
        storage: int,
        num_bytes: int,
        held: tuple[int, ...],
        need: tuple[int, ...],
        blocked: frozenset[int],
    ) -> float:
        """Return the bytes that the rank that lacks most receives."""
        if held == need:
            return 0.0
        if any(b == _SUM and a >= 0 for a, b in zip(held, need, strict=True)):
            raise PlanError("a piece of a tensor is read as a partial sum", rule="exchange")
        added_up, held = self._add_up(storage, num_bytes, held, need, blocked)
        extents, most = self.axes.sizes(storage), 0
        keeps_nothing = self._keeps_nothing(storage, held, need, blocked)
        for rank in self.ranks:
            wanted = common = 1
            for axis, extent in enumerate(extents):
                wants = _digits_along(axis, need, rank)
                wanted *= self._num_common(extent, wants, wants)
                common *= self._num_common(extent, _digits_along(axis, held, rank), wants)
            most = max(most, wanted - (0 if keeps_nothing else common))
        return added_up + num_bytes * most / math.prod(extents)

    def _keeps_nothing(
        self, storage: int, held: tuple[int, ...], need: tuple[int, ...], blocked: frozenset[int]
    ) -> bool:
        """Return whether pieces are sent anew: of a range, or laid out for other levels."""
        for axis, extent in enumerate(self.axes.sizes(storage)):
            before = {level for level, each in enumerate(held) if each == axis}
            after = {level for level, each in enumerate(need) if each == axis}
            if before and axis in blocked:
                return True
            with_digit = set(self._levels_with_digit(extent))
            if before and after and before != after and not before | after <= with_digit:
                return True
        return False

    def _add_up(
        self,
        storage: int,
        num_bytes: int,
        held: tuple[int, ...],
        need: tuple[int, ...],
        blocked: frozenset[int],
    ) -> tuple[float, tuple[int, ...]]:
        """Add partial sums up level by level, each rank its own piece where it wants a piece."""
        summed = [i for i, axis in enumerate(held) if axis == _SUM and need[i] != _SUM]
        extents, now, total = self.axes.sizes(storage), list(held), 0.0

        def can_take(level: int) -> bool:
            axis = need[level]
            if axis < 0 or axis in blocked:
                return False
            taken = [k for i, k in enumerate(self.sizes) if now[i] == axis and i != level]
            return extents[axis] % math.prod([*taken, self.sizes[level]]) == 0

        for level in range(len(held)) if summed else ():
            if held[level] == _WHOLE and can_take(level):
                now[level] = need[level]

        def num_pieces() -> int:
            return math.prod(k for axis, k in zip(now, self.sizes, strict=True) if axis >= 0)

        def piece() -> float:
            return num_bytes / num_pieces()

        for level in reversed(summed):
            if can_take(level):
                total += piece() - piece() / self.sizes[level]
                now[level] = need[level]
        ranks = [self.sizes[level] for level in summed if now[level] == _SUM]
        # Sums over several levels are scattered, added up and gathered, where elements divide.
        if math.prod(extents) // num_pieces() % math.prod(ranks[1:]) == 0:
            ranks = [math.prod(ranks)]
        total += sum(2 * (piece() - piece() / each) for each in ranks)
        return total, tuple(_WHOLE if i in summed and a == _SUM else a for i, a in enumerate(now))

    def _count_halo(self, use: Use, split: list[int], own: tuple[int, ...]) -> float:
        total = 0.0
        for level, axis in enumerate(split):
            if axis >= 0 and use.halo and use.halo[axis]:
                others = [k for i, k in enumerate(self.sizes) if i != level and own[i] >= 0]
                total += use.num_bytes * use.halo[axis] / math.prod(others)
        return total

    def _find_peak(self, extra: list[int]) -> int:
        """Run through the operators with the storages that are live; return the most bytes."""
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for storage, first, last in self._live_ranges():
            starts.setdefault(first, []).append(storage)
            ends.setdefault(last, []).append(storage)
        local = [
            -(-num_bytes // self._num_pieces(index))
            for index, num_bytes in enumerate(self.axes.num_bytes)
        ]
        live, peak = 0, 0
        for index in range(len(self.graph.operators)):
            live += sum(local[storage] for storage in starts.get(index, ()))
            peak = max(peak, live + extra[index])
            live -= sum(local[storage] for storage in ends.get(index, ()))
        return peak

    def _num_pieces(self, storage: int) -> int:
        return math.prod(
            k for axis, k in zip(self.placements[storage], self.sizes, strict=True) if axis >= 0
        )

    def _live_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield storages with the operators at which they are live for the first and last time."""
        graph = self.graph
        uses: dict[int, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            for value in operator.needs + operator.makes:
                uses.setdefault(graph.storage_of_value[value], []).append(index)
        for storage, each in enumerate(graph.storages):
            if storage not in uses and each.initial is None:
                continue
            first = 0 if each.initial is not None else min(uses[storage])
            lasts = each.persistent or each.final is not None
            last = len(graph.operators) - 1 if lasts else max(uses.get(storage, [-1]))
            if last >= first:
                yield storage, first, last


def _digits_along(axis: int, placement: tuple[int, ...], rank: tuple[int, ...]) -> _Digits:
    return tuple((level, rank[level]) for level, each in enumerate(placement) if each == axis)
