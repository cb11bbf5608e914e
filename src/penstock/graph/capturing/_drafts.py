"""Operators and storages of a step that is being recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compat.dispatch import num_owners
from penstock.graph.capturing._program_lines import error_here
from penstock.graph.costs.counts import OperatorCounts
from penstock.graph.encoding import dtype_name
from penstock.graph.step_graph import Kind, Phase, TensorView


@dataclass(slots=True)
class DraftStorage:
    """A storage; `initial` and `current` are its first value and that of now."""

    name: str
    num_bytes: int
    kind: Kind
    initial: int | None
    current: int
    handle: torch.UntypedStorage | None  # kept, so that no other storage gets its identity
    is_half: bool = False
    is_on_host: bool = False  # of a step on a GPU: it has no bytes there

    @property
    def real_bytes(self) -> int:
        """Its bytes, wherever they are."""
        return self.num_bytes if self.handle is None else self.handle.nbytes()

    def is_held(self) -> bool:
        """Return whether anything but this table holds the storage."""
        return self.handle is not None and num_owners(self.handle._cdata) > 1


@dataclass(slots=True)
class Draft:
    """An operator; the fields are those of `penstock.graph.Operator`."""

    name: str
    target: str
    phase: Phase
    module: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorView | None, ...] = ()
    reads: list[int] = field(default_factory=list)
    creates: list[int] = field(default_factory=list)
    mutates: list[tuple[int, int]] = field(default_factory=list)
    overwrites: list[tuple[int, int]] = field(default_factory=list)
    random: bool = False
    side_effect: bool = False
    is_outside: bool = False  # a constant that is made of a tensor from outside of the step
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    dropped: list[int] = field(default_factory=list)  # results without a use

    @property
    def needs(self) -> list[int]:
        """Values that must be there when it runs."""
        return [*self.reads, *(old for old, _ in self.mutates)]

    @property
    def makes(self) -> list[int]:
        """Values that are there after it has run, and were not before."""
        return [*self.creates, *(new for _, new in self.mutates)]


class StorageTable:
    """The storages of a step with their values, found by the tensors that view them.

    Attributes:
        storages: In the order in which they come to be.
        storage_of_value: For each value the index of its storage.
    """

    def __init__(self) -> None:
        self.storages: list[DraftStorage] = []
        self.storage_of_value: list[int] = []
        self._index_of_handle: dict[int, int] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._index_of_handle

    def add(
        self,
        name: str,
        num_bytes: int,
        kind: Kind,
        handle: torch.UntypedStorage | None,
        *,
        is_initial: bool = False,
    ) -> int:
        """Add a storage with its first value; return this value."""
        value = len(self.storage_of_value)
        initial = value if is_initial else None
        if handle is not None:
            self._index_of_handle[handle._cdata] = len(self.storages)
        self.storage_of_value.append(len(self.storages))
        self.storages.append(DraftStorage(name, num_bytes, kind, initial, value, handle))
        return value

    def of(self, tensor: torch.Tensor) -> DraftStorage:
        """Return the storage of a tensor."""
        return self.storages[self.index_of(tensor)]

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor's storage."""
        return self._index_of_handle[tensor.untyped_storage()._cdata]

    def of_value(self, value: int) -> DraftStorage:
        """Return the storage of a value."""
        return self.storages[self.storage_of_value[value]]

    def view(self, tensor: torch.Tensor) -> TensorView:
        """Return a tensor as a view of the current value of its storage.

        Raises:
            CaptureError: Its storage is not of this step.
        """
        index = self._index_of_handle.get(tensor.untyped_storage()._cdata)
        if index is None:
            raise error_here(
                f"a tensor of shape {tuple(tensor.shape)} is used that an earlier call of the "
                "program has made and kept; keep it in a buffer (register_buffer). If only the "
                "first call makes it, clear what keeps it and call the model once before"
            )
        return TensorView(
            self.storages[index].current,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def begin_value(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Let a tensor's storage have its next value; return the last one and this."""
        index = self.index_of(tensor)
        storage = self.storages[index]
        old, new = storage.current, len(self.storage_of_value)
        self.storage_of_value.append(index)
        storage.current = new
        return old, new
