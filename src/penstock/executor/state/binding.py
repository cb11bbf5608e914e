"""State binding: the user's tensors at the step boundary are views of the plan's memory.

Parameters, buffers and optimizer state view the places that their values have between steps, so
nothing has to be copied back: `state_dict()`, evaluation, checkpoints and changes in place read and
write the values themselves. Of a value with several places one is its *home*, which the user's
tensor views; before a step the user's changes to it are copied to the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from penstock.compat.collectives import count_collectives
from penstock.errors import PenstockError
from penstock.executor.memory.blocks import PlanMemory, copy_elements, narrow_expanded
from penstock.executor.memory.residency import ResidencyInterval
from penstock.executor.state._parallel_move import ByteMove, move_in_parallel
from penstock.graph import Kind, StepGraph, TensorView
from penstock.graph.bindings import (
    STATE_PREFIX,
    StateEntry,
    check_form,
    find_entries,
    find_initial_fill,
)
from penstock.graph.capturing.schemas import UNDECLARED_WRITES
from penstock.graph.encoding import dtype_from_name, view_memory
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.step_graph import views_in
from penstock.memory import Tier

_HOME_TIERS = (Tier.DEVICE, Tier.HOST, Tier.FILE)  # the preferred one first


class _BoundTensor(NamedTuple):
    """A tensor of the user's that views its home."""

    entry: StateEntry
    tensor: torch.Tensor
    address: int


class StateBinding:
    """A model, its loss and its optimizer, bound to the places of a plan.

    Attributes:
        places: For each persistent storage its places at the step boundary, its home first.

    Raises:
        GraphFileError: The graph is of another model or optimizer; nothing has been touched.
        ValueError: State is missing and the graph does not say how it begins.
    """

    def __init__(
        self,
        memory: PlanMemory,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: object,
        sharded: ShardedModel,
    ) -> None:
        graph = memory.graph
        self._graph = graph
        self._memory = memory
        self.places: dict[int, list[ResidencyInterval]] = {
            index: _sort_places(memory, memory.index.find_at_step_boundary(index))
            for index, storage in enumerate(graph.storages)
            if storage.persistent and storage.num_bytes
        }
        self._lasting_inputs = {
            name: storage
            for name, view in graph.tensors.items()
            if (storage := memory.storage_of(view)) in self.places
            and graph.storages[storage].kind is Kind.INPUT
        }
        self._sharded = sharded
        self._entries = find_entries(graph, model, loss, optimizer, sharded)
        self._bound: list[_BoundTensor] = []
        self._made: list[StateEntry] = []  # state that did not exist before
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}
        # Between steps a batch norm in training mode changes these without a new version.
        self._statistics = {
            storage: torch.empty_like(self._home_of(storage))
            for storage in _find_running_statistics(graph)
            if len(self.places.get(storage, [])) > 1
        }
        self._changing = _find_changing(graph)
        self._num_collectives: int | None = None
        self._eager_steps: list[None] = []
        hook = _note_eager_steps(optimizer, self._eager_steps)
        self._remove_hook = weakref.finalize(self, hook.remove)

    def take_over(self) -> None:
        """Move the user's tensors to their homes, from any memory: also from the places that
        another plan has for them in the same blocks.
        """
        tensors = [entry.get() for entry in self._entries]
        moves: dict[int, ByteMove] = {}
        moved = set()
        for index, (entry, tensor) in enumerate(zip(self._entries, tensors, strict=True)):
            if tensor is None or not self._memory.blocks.contains(tensor.data_ptr()):
                continue
            source, home = self._storage_around(tensor, entry.view), self._home_bytes(entry.view)
            if source is None:
                tensors[index] = tensor.detach().clone()
            elif source.data_ptr() != home.data_ptr():
                moves[self._memory.storage_of(entry.view)] = ByteMove(source, home)
                moved.add(index)
        move_in_parallel(list(moves.values()))
        self._bound = [
            self._bind(entry, None if index in moved else tensor)
            for index, (entry, tensor) in enumerate(zip(self._entries, tensors, strict=True))
        ]
        self.copy_all_homes()

    def copy_all_homes(self) -> None:
        """Copy all homes to their other places; no transfer is under way."""
        for storage in self.places:
            self.copy_home(storage)
        self.record_versions()

    def copy_home(self, storage: int) -> None:
        """Copy a storage's home to its other places."""
        intervals = self.places.get(storage, [])
        if len(intervals) < 2:
            return
        home = self._home_of(storage)
        for interval in intervals[1:]:
            self._memory.bytes_of(interval, home.numel()).copy_(home)

    def copy_changes(self, wait: Callable[[], None]) -> set[int]:
        """Copy the user's changes between two steps, in place or by assignment, to all places.

        Returns the storages that were assigned to, or changed while they have several places.
        `wait` waits for transfers that are under way, before anything is written.
        """
        changed: set[int] = set()
        self.reshard()
        for index, (entry, tensor, address) in enumerate(self._bound):
            if entry.get() is tensor and tensor.data_ptr() == address:
                continue
            if not changed:
                wait()
            self._check_home(entry)
            self._bound[index] = self._bind(entry, entry.get())
            changed.add(self._memory.storage_of(entry.view))
        all_may_be_old = bool(self._eager_steps) or self._has_seen_collectives()
        for storage in self._versions:
            if all_may_be_old or self._is_old(storage):
                if not changed:
                    wait()
                changed.add(storage)
        self._eager_steps.clear()
        for storage in changed:
            self.copy_home(storage)
        return changed

    def _has_seen_collectives(self) -> bool:
        """Return whether ranks may have exchanged tensors since the last step: torch counts no
        versions of what collectives write.
        """
        count = count_collectives()
        return count is None or count != self._num_collectives

    def _is_old(self, storage: int) -> bool:
        """Return whether a storage's other places lack a change of its home."""
        if any(tensor._version != version for tensor, version in self._versions[storage]):
            return True
        copy = self._statistics.get(storage)
        return copy is not None and not torch.equal(copy, self._home_of(storage))

    def reshard(self) -> None:
        """Let a sharded model hold its shards, as between steps; no effect on other models."""
        self._sharded.reshard()

    def write_lasting_inputs(
        self, inputs: Mapping[str, torch.Tensor], wait: Callable[[], None]
    ) -> set[int]:
        """Write inputs that may lie below the device, parts of a batch, to all their places.

        Returns their storages. `wait` waits for transfers that are under way.
        """
        if self._lasting_inputs:
            wait()
        for name, storage in self._lasting_inputs.items():
            for interval in self.places[storage]:
                place = self._memory.view_in(interval, self._graph.tensors[name])
                copy_elements(inputs[name], place)
                self._memory.evict_pages(place)
        return set(self._lasting_inputs.values())

    def move_out(self) -> None:
        """Give the user's tensors memory of their own again, except those that never had any."""
        fresh: dict[int, torch.UntypedStorage] = {}
        for entry, tensor, address in self._bound:
            if entry.get() is not tensor or tensor.data_ptr() != address:
                continue
            if self._is_materialized(entry):
                continue
            storage = self._memory.storage_of(entry.view)
            if storage not in fresh:
                has_bytes = self._graph.storages[storage].num_bytes
                home = self._home_bytes(entry.view)
                copy = home.to(self._memory.device if has_bytes else "cpu", copy=True)
                fresh[storage] = copy.untyped_storage()
            memory = fresh[storage]
            tensor.data = view_memory(memory, entry.view, memory.device)
            if flat := entry.get_flat_shard():
                flat[0].data = view_memory(memory, flat[1], memory.device)
        self.unbind()

    def undo(self) -> None:
        """Let everything be as before `take_over`: on the meta device what was there, no state that
        was made, and all else in memory of its own.
        """
        materialized = self._memory.blocks.materialized
        for entry, tensor, _ in self._bound:
            if self._storage_name(entry) in materialized:
                _materialize(tensor, torch.empty_like(tensor, device="meta"))
        for entry in self._made:
            entry.holder().pop(entry.key, None)
        materialized.clear()
        self.move_out()

    def unbind(self) -> None:
        """Forget the user's tensors."""
        self._bound = []
        self._remove_hook()

    def count_changes(self) -> None:
        """Let torch count what a step has changed, so that a backward pass of a forward pass before
        the step is an error, as after an ordinary step.
        """
        increment_version(
            [
                tensor
                for entry, tensor, _ in self._bound
                if entry.owner is None and self._memory.storage_of(entry.view) in self._changing
            ]
        )

    def record_versions(self) -> None:
        """Record the versions after a step, which are none of the user's changes, and what torch
        changes without a new one.
        """
        self._num_collectives = count_collectives()
        for storage, copy in self._statistics.items():
            copy.copy_(self._home_of(storage))
        self._versions = {}
        for entry, tensor, _ in self._bound:
            storage = self._memory.storage_of(entry.view)
            if len(self.places.get(storage, [])) > 1:
                seen = self._versions.setdefault(storage, [])
                seen.append((tensor, tensor._version))
                whole = entry.get_whole()  # torch counts changes of a DTensor apart
                if whole is not None and whole is not tensor:
                    seen.append((whole, whole._version))

    def iter_places(self, changed: set[int]) -> Iterator[tuple[ResidencyInterval, int]]:
        """Yield the places that no transfer is writing: homes, and all places of changed storages,
        with their bytes.
        """
        for storage, intervals in self.places.items():
            for interval in intervals if storage in changed else intervals[:1]:
                yield interval, self._graph.storages[storage].num_bytes

    def names_of(self, storage: int) -> list[str]:
        """Return the user's names of a storage."""
        return [
            entry.name for entry in self._entries if self._memory.storage_of(entry.view) == storage
        ]

    def _storage_around(self, tensor: torch.Tensor, view: TensorView) -> torch.Tensor | None:
        """Return the bytes of the storage that a tensor views, if it does so as in the graph."""
        if tensor.stride() != view.stride or tensor.shape != view.shape:
            return None
        address = tensor.data_ptr() - view.offset * tensor.element_size()
        num_bytes = self._graph.num_bytes(view.value)
        for block in self._memory.blocks:
            begin = address - block.tensor.data_ptr()
            if 0 <= begin <= block.tensor.numel() - num_bytes:
                return block.bytes_at(begin, num_bytes)
        return None

    def _is_materialized(self, entry: StateEntry) -> bool:
        """Return whether a tensor was on the meta device, or is state of such a model."""
        names = self._memory.blocks.materialized
        return self._storage_name(entry) in names or (
            bool(names) and entry.name.startswith(STATE_PREFIX)
        )

    def _storage_name(self, entry: StateEntry) -> str:
        return self._graph.storages[self._memory.storage_of(entry.view)].name

    def _home_of(self, storage: int) -> torch.Tensor:
        """Return the bytes of a storage's home."""
        num_bytes = self._graph.storages[storage].num_bytes
        return self._memory.bytes_of(self.places[storage][0], num_bytes)

    def _home_bytes(self, view: TensorView) -> torch.Tensor:
        storage = self._memory.storage_of(view)
        if self._graph.storages[storage].num_bytes:
            return self._home_of(storage)
        unplanned = self._memory.view_unplanned(view)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(unplanned.untyped_storage())

    def _view_home(self, view: TensorView) -> torch.Tensor:
        if not self._graph.num_bytes(view.value):
            return self._memory.view_unplanned(view)
        return self._memory.view_in(self.places[self._memory.storage_of(view)][0], view)

    def _bind(self, entry: StateEntry, content: torch.Tensor | None) -> _BoundTensor:
        """Let a tensor of the user's view its home, to which its content is copied."""
        home = self._view_home(entry.view)
        tensor = entry.get()
        if tensor is None:
            narrow_expanded(home).fill_(find_initial_fill(self._graph, entry.name))
            tensor = entry.set(home.detach())
            self._made.append(entry)
            self._memory.evict_pages(tensor)
            return _BoundTensor(entry, tensor, tensor.data_ptr())
        check_form(entry.name, entry.view, tensor)
        if tensor.is_meta:
            tensor = _materialize(tensor, home)
            self._memory.evict_pages(home)
            self._memory.blocks.materialized.add(self._storage_name(entry))
        elif content is not None and content.data_ptr() != home.data_ptr():
            copy_elements(content, home)
            self._memory.evict_pages(home)
        if tensor.data_ptr() != home.data_ptr() or not home.numel():
            tensor.data = home.detach()
        if flat := entry.get_flat_shard():
            flat[0].data = self._view_home(flat[1])
        return _BoundTensor(entry, tensor, tensor.data_ptr())

    def _check_home(self, entry: StateEntry) -> None:
        """Refuse a storage whose memory torch has replaced: the plan's views are of the old one."""
        view = entry.view
        if not self._graph.num_bytes(view.value) or 0 in view.shape:
            return
        offset = view.offset * dtype_from_name(view.dtype).itemsize
        if self._view_home(view).data_ptr() != self._home_bytes(view).data_ptr() + offset:
            raise PenstockError(
                f"the memory of {entry.name} has been moved (share_memory(), or a queue to "
                "another process), which a plan's addresses do not survive: pass copies to other "
                "processes (tensor.clone()), and bind the plan again"
            )


def _find_running_statistics(graph: StepGraph) -> set[int]:
    """Return the storages that batch norms update, or would in training mode."""
    return {
        graph.storage_of_value[view.value]
        for operator in graph.operators
        for position in UNDECLARED_WRITES.get(operator.target, ())
        for view in views_in(operator.args[position])
    }


def _find_changing(graph: StepGraph) -> set[int]:
    """Return the persistent storages that a step writes to."""
    return {
        index
        for index, storage in enumerate(graph.storages)
        if storage.persistent and storage.initial != storage.final
    }


def _note_eager_steps(optimizer: torch.optim.Optimizer, seen: list[None]) -> RemovableHandle:
    """Note ordinary steps of an optimizer: torch counts no versions of fused or `foreach` ones."""
    watched = weakref.ref(optimizer)

    def note(stepper: torch.optim.Optimizer, *_: object) -> None:
        if stepper is watched():
            seen[:] = [None]

    return register_optimizer_step_post_hook(note)


def _materialize(tensor: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """Let a tensor of the meta device view its home; it stays the same object.

    It is NaN until it is initialized, so that a forgotten initialization shows.
    """
    narrow_expanded(home).fill_(torch.nan if tensor.is_floating_point() else 0)
    if isinstance(tensor, nn.Parameter):
        real: torch.Tensor = nn.Parameter(home.detach(), requires_grad=tensor.requires_grad)
    else:
        real = home.detach()
    vars(real).update(vars(tensor))
    torch.utils.swap_tensors(tensor, real)
    return tensor


def _sort_places(memory: PlanMemory, intervals: list[ResidencyInterval]) -> list[ResidencyInterval]:
    """Return distinct places, the home first: no transfer is writing it when a step begins."""
    plan = memory.plan

    def rank(each: ResidencyInterval) -> tuple[bool, bool, int]:
        end = 0 if each.transfer is None else plan.transfers[each.transfer].end
        arrives_later = each.steps_ago > 0 and end >= len(plan.order)
        return arrives_later, each.end == 0, _HOME_TIERS.index(each.tier)

    ordered = sorted(intervals, key=rank)
    # An interval that ends a step in the place where another begins the next one is listed twice.
    first = {
        (each.tier, memory.offset_of(each.tier, each.place)): each for each in reversed(ordered)
    }
    return [each for each in ordered if each in first.values()]
