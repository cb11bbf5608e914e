"""A rank's storages while its step is written: the pieces that it has, and views of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from math import prod
from typing import Any

from penstock.errors import PlanError
from penstock.graph.step_graph import StepGraph, TensorView, views_in
from penstock.partitioner._mesh import (
    PARTIAL,
    REPLICATED,
    Mesh,
    Placement,
    level_byte_seconds,
    make_mesh,
)
from penstock.partitioner._partition import Partition
from penstock.partitioner._pieces import StoragePiece, view_piece
from penstock.partitioner._rank_builder import RankBuilder, whole_extents
from penstock.partitioner.axes import find_axes


class RankStorages:
    """The pieces of one rank.

    Attributes:
        graph: The step of all devices.
        axes: Its axes.
        mesh: Levels of ranks.
        placements: Of its storages, by axes.
        splits: Of its operators, by axes.
        builder: The rank's step as far as it is written.
        pieces: By value of the whole step: the rank's piece of it, at rest.
        ends: For each storage the elements up to the last one that a view shows.
        last_written: For each operator of the whole step the rank's last one of it.
    """

    def __init__(
        self,
        graph: StepGraph,
        partition: Partition,
        coordinates: tuple[int, ...],
        groups: tuple[str, ...],
    ) -> None:
        self.graph = graph
        self.axes = find_axes(graph)
        self.mesh: Mesh = make_mesh(partition.mesh, partition.machine)
        self.placements = [
            tuple(_axis_of_stride(each, cuts) for each in strides)
            for strides, cuts in zip(partition.placements, self.axes.cuts, strict=True)
        ]
        self.splits = [
            tuple(_axis_of_letter(each, axes.names) for each in letters)
            for letters, axes in zip(partition.splits, self.axes.operators, strict=True)
        ]
        byte_seconds = level_byte_seconds(self.mesh, partition.machine)
        self.builder = RankBuilder(self.mesh, coordinates, groups, byte_seconds)
        self.pieces: dict[int, StoragePiece] = {}
        self.ends: list[int] = _find_ends(graph)
        self.last_written: list[int] = []

    def extents(self, storage: int) -> tuple[int, ...]:
        """Return the extents of a storage's axes; of one without axes its elements."""
        return self.axes.sizes(storage) or (self.ends[storage],)

    def local_bytes(self, storage: int, placement: Placement) -> int:
        """Return the bytes of a rank's piece."""
        sizes = self.mesh.sizes
        pieces = prod(k for axis, k in zip(placement, sizes, strict=True) if axis >= 0)
        return -(-self.axes.num_bytes[storage] // pieces)

    def new_piece(self, storage: int, placement: Placement, dtype: str) -> StoragePiece:
        """Return a piece in a storage of its own."""
        extents, strides = whole_extents(self.extents(storage), placement, self.mesh)
        each = self.graph.storages[storage]
        num_bytes = self.local_bytes(storage, placement)
        value = self.builder.storage(each.name, num_bytes, each.kind)
        return StoragePiece(value, dtype, placement, (0,) * len(extents), extents, strides)

    def add_initial(self, storage: int, value: int) -> None:
        dtype = next(
            (view.dtype for view in self.graph.tensors.values() if view.value == value), "float32"
        )
        piece = self.new_piece(storage, self.placements[storage], dtype)
        self.pieces[value] = piece
        self._change_storage(piece.value, initial=piece.value)

    def _change_storage(self, value: int, **fields: Any) -> None:
        index = self.builder.storage_of_value[value]
        storages = self.builder.storages
        storages[index] = dataclasses.replace(storages[index], **fields)

    def set_lasting(self) -> None:
        """Note which values outlive the step, under the names that they have in the whole one."""
        number = Counter(each.name for each in self.builder.storages)
        for storage in self.graph.storages:
            if storage.final is None:
                continue
            value = self.pieces[storage.final].value
            own = self.builder.storages[self.builder.storage_of_value[value]].name
            is_taken = number[storage.name] > (own == storage.name)
            name = f"{storage.name}:rest" if is_taken else storage.name
            number[own] -= 1
            number[name] += 1
            self._change_storage(value, final=value, name=name)

    def rest_view(self, view: TensorView) -> TensorView:
        """Return a rank's part of a view of a value at rest."""
        storage = self.graph.storage_of_value[view.value]
        # Initial values are asked for when the step has been written: they are gone by then.
        piece = self.pieces[view.value]
        cuts, placement = self.axes.cuts[storage], self.placements[storage]
        shape = local_shape(view, cuts, placement, self.mesh.sizes)
        found = self.view(view, storage, piece, shape)
        if found is None:
            raise PlanError(
                f"{self.graph.storages[storage].name!r} rests in pieces that are no tensors",
                rule="placement",
            )
        return found

    def view(
        self, view: TensorView, storage: int, piece: StoragePiece, shape: tuple[int, ...]
    ) -> TensorView | None:
        """Return a piece's part of a view; None if it is no view."""
        cuts = self.axes.cuts[storage]
        if len(cuts) == 1:
            return view._replace(value=piece.value, shape=shape)
        return view_piece(view, cuts, piece, shape)


def local_shape(
    view: TensorView, cuts: tuple[int, ...], placement: Placement, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of a rank's part of a view at rest, by the axes that dimensions cover."""
    shape = []
    for size, stride in zip(view.shape, view.stride, strict=True):
        for axis, k in zip(placement, sizes, strict=True):
            if axis >= 0 and size > 1 and stride <= cuts[axis] < stride * size:
                size //= k
        shape.append(size)
    return tuple(shape)


def _axis_of_stride(stride: int, cuts: tuple[int, ...]) -> int:
    if stride <= 0:
        return PARTIAL if stride else REPLICATED
    return cuts.index(stride)


def _axis_of_letter(letter: str, names: tuple[str, ...]) -> int:
    if not letter:
        return REPLICATED
    return PARTIAL if letter == "+" else names.index(letter)


def _find_ends(graph: StepGraph) -> list[int]:
    """Return for each storage the elements up to the last one that a view shows."""
    ends = [1] * len(graph.storages)
    for operator in graph.operators:
        views = [*views_in([operator.args, dict(operator.kwargs)])]
        for view in (*views, *(each for each in operator.outputs if each is not None)):
            storage = graph.storage_of_value[view.value]
            ends[storage] = max(ends[storage], view.end)
    return ends
