"""What is left of model and optimizer when a step fails, and how they come to be as before it.

Until the first parameter changes (the *commit*), what a step begins with is complete somewhere: on
the device or below it, as the plan has it. After that a parameter may be there as before the step,
as after it, or between the two; then the error says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from penstock.executor._links import ThreadLink
from penstock.executor._operators import Call
from penstock.executor._places import Places, Stay
from penstock.executor._program import Stage
from penstock.executor._room import Room
from penstock.executor._seam import Seam
from penstock.graph import Phase, StepGraph
from penstock.memory import Link
from penstock.planner import Plan

_SMALL_BYTES = 4 * 2**20  # of running statistics; what is larger goes to where memory is less dear


class Outcome(NamedTuple):
    """What a failed step left.

    Attributes:
        updated: Names of tensors that are as after the step.
        lost: Names of tensors that are neither as before nor as after it.
    """

    updated: tuple[str, ...]
    lost: tuple[str, ...]


class Recovery:
    """Knows for every position what of the persistent storages is where.

    Args:
        graph: The step.
        plan: A plan for it.
        places: Where its values are.
        room: Its memory.
        seam: The user's tensors.
        links: What carries out the transfers.

    Attributes:
        commit: First position at which the optimizer changes something that cannot be undone; the
            number of positions if there is none.
        num_bytes: Of copies of what changes before it.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: Plan,
        places: Places,
        room: Room,
        seam: Seam,
        links: Mapping[Link, ThreadLink],
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._places = places
        self._room = room
        self._seam = seam
        self._links = links
        self.commit = self._find_commit()
        self._number_on_link = _numbers_on_links(plan)
        self._values: dict[int, list[int]] = {index: [] for index in seam.places_of}
        for value, storage in enumerate(graph.storage_of_value):
            if storage in self._values:
                self._values[storage].append(value)
        # Before the commit: what changes where, and a copy of what it was.
        self._changes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._saved_storages: dict[int, tuple[int, torch.Tensor]] = {}
        self._loose_copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._loose_changes: dict[int, list[int]] = {}
        self.num_bytes = 0
        self._plan_snapshots()

    def before(self, position: int) -> Iterator[Call]:
        """What keeps a copy of what the operator at a position is about to change."""
        pairs = self._changes.get(position)
        if pairs:
            copies, originals = map(list, zip(*pairs, strict=True))
            yield lambda: torch.ops.aten._foreach_copy_.default(copies, originals)

    def restore(self, position: int, stage: Stage) -> Outcome:
        """Bring what a failed step left to where a step begins.

        Args:
            position: Where it failed; no transfer is under way.
            stage: How far the boundary there was.

        Returns:
            What is not as before the step; both empty if all is.
        """
        started = stage is Stage.RUNNING
        for at, copy, original in self._loose_copies:
            if at < position or (at == position and started):
                original.copy_(copy)
        updated, lost, moved = [], [], {}
        for storage, stays in self._seam.places_of.items():
            value, source = self._find(storage, position, stage)
            names = self._seam.names_of(storage) or [self._graph.storages[storage].name]
            block = self._graph.storages[storage]
            if value is None:
                lost += names
            elif value != block.initial:
                (updated if value == block.final else lost).extend(names)
            if source is not None and not self._is_home(source, stays[0]):
                moved[storage] = self._content(source, block.num_bytes).clone()
        for storage, content in moved.items():
            home = self._seam.places_of[storage][0]
            self._room.bytes_of(home, content.numel()).copy_(content)
        for storage in self._seam.places_of:
            self._seam.spread(storage)
        updated += self._updated_loose(position)
        return Outcome(tuple(updated), tuple(lost))

    # Where things are.

    def _find(
        self, storage: int, position: int, stage: Stage
    ) -> tuple[int | None, Stay | torch.Tensor | None]:
        """The value of a storage that is complete somewhere, the one before the step if it is."""
        block = self._graph.storages[storage]
        saved = self._saved_storages.get(storage)
        if saved is not None and (
            saved[0] < position or (saved[0] == position and stage is Stage.RUNNING)
        ):
            return block.initial, saved[1]
        ordered = [block.initial, block.final, *self._values[storage]]
        for value in dict.fromkeys(each for each in ordered if each is not None):
            for stay in self._places.stays[value]:
                if self._is_complete(value, stay, position, stage):
                    return value, stay
        return None, None

    def _is_complete(self, value: int, stay: Stay, position: int, stage: Stage) -> bool:
        if stay.start > position or stay.end < position:
            return False
        if stay.end == position:
            operator = self._graph.operators[self._plan.order[position]]
            kept = stage is Stage.LEAVING or value in operator.needs
            if stage is Stage.RUNNING or not kept:
                return False
        if stay.transfer is not None:
            return self._has_arrived(stay.transfer, stay.steps_ago)
        is_made = self._graph.producers[value] is not None and stay.start >= 0
        storage = self._graph.storages[self._graph.storage_of_value[value]]
        if is_made and value != storage.initial:
            return stay.start < position
        return True

    def _has_arrived(self, transfer: int, steps_ago: int) -> bool:
        link = self._links[self._plan.transfers[transfer].link]
        number = self._number_on_link[transfer] - steps_ago * link.num_moves
        return link.done - link.base > number

    def _is_home(self, source: Stay | torch.Tensor, home: Stay) -> bool:
        return isinstance(source, Stay) and (
            source.tier is home.tier
            and self._room.offset(source.tier, source.place)
            == self._room.offset(home.tier, home.place)
        )

    def _content(self, source: Stay | torch.Tensor, num_bytes: int) -> torch.Tensor:
        if isinstance(source, Stay):
            return self._room.bytes_of(source, num_bytes)
        return source

    # Before the commit.

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
        return self._graph.storages[self._graph.storage_of_value[value]].persistent

    def _plan_snapshots(self) -> None:
        """Copies of running statistics and step counts that change before the commit."""
        seen: set[int] = set()
        for position, index in enumerate(self._plan.order):
            for old, _ in self._graph.operators[index].mutates:
                storage = self._graph.storage_of_value[old]
                if not self._is_persistent(old):
                    continue
                num_bytes = self._graph.storages[storage].num_bytes
                if not num_bytes:
                    self._loose_changes.setdefault(storage, []).append(position)
                if position >= self.commit or storage in seen:
                    continue
                seen.add(storage)
                self._keep(storage, old, position)

    def _keep(self, storage: int, old: int, position: int) -> None:
        num_bytes = self._graph.storages[storage].num_bytes
        if num_bytes:
            offset = self._places.operand(old, position)
            original = self._room.arena.bytes_at(offset, num_bytes)
            self.num_bytes += num_bytes
            if self.num_bytes <= _SMALL_BYTES:
                copy = torch.empty_like(original)
            else:
                copy = self._room.shared.aside(num_bytes)
            self._saved_storages[storage] = (position, copy)
        else:
            of = self._graph.storage_of_value
            views = self._graph.tensors.values()
            original = self._room.loose(next(v for v in views if of[v.value] == storage))
            copy = torch.empty_like(original)
            self._loose_copies.append((position, copy, original))
        self._changes.setdefault(position, []).append((copy, original))

    def _updated_loose(self, position: int) -> list[str]:
        """Numbers without bytes that had changed after the commit, and stay so.

        An operator that failed has not changed such a number.
        """
        names = []
        for storage, positions in self._loose_changes.items():
            done = [at for at in positions if at < position]
            if done and max(done) >= self.commit:
                names += self._seam.names_of(storage)
        return names


def _numbers_on_links(plan: Plan) -> list[int]:
    """For each transfer how many come before it on its link."""
    counts: dict[Link, int] = {}
    numbers = []
    for transfer in plan.transfers:
        numbers.append(counts.get(transfer.link, 0))
        counts[transfer.link] = numbers[-1] + 1
    return numbers
