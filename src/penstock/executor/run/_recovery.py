"""Recovery of model and optimizer from a failed step.

Until the first parameter changes (the *commit*), the state before the step is complete in the
plan's places, on the device or below it. After that a parameter may be as before the step, as after
it, or between the two; then the error names it.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from penstock.executor.device.links import ThreadLink
from penstock.executor.memory.blocks import PlanMemory
from penstock.executor.memory.residency import ResidencyInterval
from penstock.executor.program.executable import BoundaryStage
from penstock.executor.program.operators import Call
from penstock.executor.state.binding import StateBinding
from penstock.graph import Phase
from penstock.graph.encoding import resolve
from penstock.memory import Link

_SMALL_BYTES = 4 * 2**20  # of running statistics; more goes below the device


class StepRecovery:
    """Recovery of the steps of one plan.

    Attributes:
        commit: First position at which the optimizer changes state for good; the number of
            positions if there is none.
        num_bytes: Bytes of the copies of state that changes before it.
    """

    def __init__(
        self, memory: PlanMemory, state: StateBinding, links: Mapping[Link, ThreadLink]
    ) -> None:
        self._graph = memory.graph
        self._plan = memory.plan
        self._memory = memory
        self._state = state
        self._links = links
        self.commit = self._find_commit()
        counters: defaultdict[Link, Iterator[int]] = defaultdict(itertools.count)
        self._number_on_link = [next(counters[each.link]) for each in memory.plan.transfers]
        self._values: dict[int, list[int]] = {index: [] for index in state.places}
        for value, storage in enumerate(self._graph.storage_of_value):
            if storage in self._values:
                self._values[storage].append(value)
        # Before the commit: the copies and originals of changes, by position and by storage.
        self._changes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._saved_storages: dict[int, tuple[int, torch.Tensor]] = {}
        self._unplanned_copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._unplanned_changes: dict[int, list[int]] = {}
        self.num_bytes = 0
        self._plan_snapshots()

    def iter_calls_before(self, position: int) -> Iterator[Call]:
        """Yield calls that copy the state that the operator at a position is about to change."""
        pairs = self._changes.get(position)
        if pairs:
            copies, originals = map(list, zip(*pairs, strict=True))
            yield functools.partial(resolve("aten._foreach_copy_.default"), copies, originals)

    def restore(
        self, position: int, stage: BoundaryStage
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Move the state of a step that failed at a position to the places at the step boundary;
        no transfer is under way.

        Returns:
            The names of tensors that are as after the step, and of those that are neither as before
            nor as after it.
        """
        for at, copy, original in self._unplanned_copies:
            if (at, BoundaryStage.RUNNING) <= (position, stage):
                original.copy_(copy)
        updated, lost, moves = [], [], []
        for index, intervals in self._state.places.items():
            storage = self._graph.storages[index]
            value, content = self._find(index, position, stage)
            names = self._state.names_of(index) or [storage.name]
            if value is None:
                lost += names
            elif value != storage.initial:
                (updated if value == storage.final else lost).extend(names)
            home = self._memory.bytes_of(intervals[0], storage.num_bytes)
            if content is not None and content.data_ptr() != home.data_ptr():
                moves.append((home, content.clone()))
        for home, content in moves:
            home.copy_(content)
        for index in self._state.places:
            self._state.copy_home(index)
        updated += self._find_updated_unplanned(position)
        return tuple(updated), tuple(lost)

    def _find(
        self, storage: int, position: int, stage: BoundaryStage
    ) -> tuple[int | None, torch.Tensor | None]:
        """Return a complete value of a storage and its bytes, if possible those before the step."""
        block = self._graph.storages[storage]
        saved_at, copy = self._saved_storages.get(storage, (len(self._plan.order), None))
        if (saved_at, BoundaryStage.RUNNING) <= (position, stage):
            return block.initial, copy
        ordered = [block.initial, block.final, *self._values[storage]]
        for value in dict.fromkeys(each for each in ordered if each is not None):
            for interval in self._memory.index.intervals[value]:
                if self._is_complete(value, interval, position, stage):
                    return value, self._memory.bytes_of(interval, block.num_bytes)
        return None, None

    def _is_complete(
        self, value: int, interval: ResidencyInterval, position: int, stage: BoundaryStage
    ) -> bool:
        if interval.start > position or interval.end < position:
            return False
        if interval.end == position:
            operator = self._graph.operators[self._plan.order[position]]
            is_kept = stage is BoundaryStage.LEAVING or value in operator.needs
            if stage is BoundaryStage.RUNNING or not is_kept:
                return False
        if interval.transfer is not None:
            return self._has_arrived(interval.transfer, interval.steps_ago)
        is_made = self._graph.producers[value] is not None and interval.start >= 0
        storage = self._graph.storage(value)
        if is_made and value != storage.initial:
            return interval.start < position
        return True

    def _has_arrived(self, transfer: int, steps_ago: int) -> bool:
        link = self._links[self._plan.transfers[transfer].link]
        number = self._number_on_link[transfer] - steps_ago * link.num_moves
        return link.done - link.base > number

    def _find_commit(self) -> int:
        for position, index in enumerate(self._plan.order):
            operator = self._graph.operators[index]
            if operator.phase is Phase.OPTIMIZER and any(
                self._is_persistent(old) and self._graph.num_bytes(old)
                for old, _ in operator.mutates
            ):
                return position
        return len(self._plan.order)

    def _is_persistent(self, value: int) -> bool:
        return self._graph.storage(value).persistent

    def _plan_snapshots(self) -> None:
        """Plan copies of running statistics and step counts that change before the commit."""
        seen: set[int] = set()
        for position, index in enumerate(self._plan.order):
            for old, _ in self._graph.operators[index].mutates:
                storage = self._graph.storage_of_value[old]
                if not self._is_persistent(old):
                    continue
                num_bytes = self._graph.storages[storage].num_bytes
                if not num_bytes:
                    self._unplanned_changes.setdefault(storage, []).append(position)
                if position >= self.commit or storage in seen:
                    continue
                seen.add(storage)
                self._plan_snapshot(storage, old, position)

    def _plan_snapshot(self, storage: int, old: int, position: int) -> None:
        num_bytes = self._graph.storages[storage].num_bytes
        if num_bytes:
            offset = self._memory.index.find_operand(old, position)
            original = self._memory.arena.bytes_at(offset, num_bytes)
            self.num_bytes += num_bytes
            if self.num_bytes <= _SMALL_BYTES:
                copy = torch.empty_like(original)
            else:
                copy = self._memory.blocks.allocate_undo(num_bytes)
            self._saved_storages[storage] = (position, copy)
        else:
            views = self._graph.tensors.values()
            view = next(each for each in views if self._memory.storage_of(each) == storage)
            original = self._memory.view_unplanned(view)
            copy = torch.empty_like(original)
            self._unplanned_copies.append((position, copy, original))
        self._changes.setdefault(position, []).append((copy, original))

    def _find_updated_unplanned(self, position: int) -> list[str]:
        """Return the names of state without planned bytes that changed after the commit.

        An operator that failed has not changed such a number.
        """
        names = []
        for storage, positions in self._unplanned_changes.items():
            done = [at for at in positions if at < position]
            if done and max(done) >= self.commit:
                names += self._state.names_of(storage)
        return names
