"""The memory of a plan, replayed boundary by boundary over three steps, for `check`.

The replay tracks contents: the version of a storage that lies, complete, at each place. The first
step only sets the scene: values that it carries over its end are assumed to be there, though never
two versions at one address. In the two steps after it nothing is assumed, and the second of them
begins with the state at the end of the first. If that is the state which the first began with, the
second does the same, and is not replayed.

A version is named by its value and its step; the value `initial` of a persistent storage is the
value `final` of the step before, under which it is filed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import NoReturn

from penstock.errors import PlanError
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Copy, Placement
from penstock.planner._replay_records import (
    BoundaryEvents,
    HeldVersion,
    TransferRun,
    Version,
    VersionPlace,
    describe_state,
    list_accesses,
    list_renames,
)

_NOTHING = BoundaryEvents()  # of boundaries at which nothing begins or ends


class Replay:
    """Three steps of a plan; `run` raises a `PlanError` where a rule is broken."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.num_positions = len(plan.order)
        self.needs, self.makes, self.mutates = list_accesses(graph, plan)
        self.renames = list_renames(graph)
        self.strict = False
        self.step = 0
        self.position = 0
        self.blocks: dict[VersionPlace, HeldVersion] = {}
        self.addresses: list[tuple[int, int, Version]] = []  # taken ones, sorted
        self.held_bytes = {Tier.HOST: 0, Tier.FILE: 0}
        self.events: defaultdict[int, BoundaryEvents] = defaultdict(BoundaryEvents)
        self._sort_events()

    def run(self) -> None:
        """Replay a step whose begin is assumed to be right, then two without assumptions; of the
        second no more than its begin, if all is then as it was at the begin of the first.
        """
        before = None
        for step in range(3 if self.num_positions else 0):
            self.step, self.strict, self.position = step, step > 0, 0
            self._cross_boundary()
            state = describe_state(self.blocks, self.renames, step, step * self.num_positions)
            if step == 2 and state == before:
                return  # the rest of the step, and the end, are as in the step before
            before = state
            self._run_operator()
            for position in range(1, self.num_positions):
                self.position = position
                self._cross_boundary()
                self._run_operator()
        self.step, self.position = 3, 0
        if self.num_positions:
            self._cross_boundary()

    # Events.

    def _sort_events(self) -> None:
        """Sort events by boundary, and refuse those without a cause."""
        for index, transfer in enumerate(self.plan.transfers):
            self.events[transfer.start].transfers_begin.append(index)
            self.events[transfer.end].transfers_end.append(index)
        for index, placement in enumerate(self.plan.placements):
            begin = self.events[placement.start].placements_begin
            if placement.num_bytes:
                if begin.setdefault(placement.value, index) != index:
                    self._fail("placed_twice", f"value {placement.value} is placed twice", index)
                self.events[placement.end].placements_end.append(index)
        for index, copy in enumerate(self.plan.copies):
            begin = self.events[copy.start].copies_begin
            if begin.setdefault((copy.tier, copy.value), index) != index:
                self._fail("copy", f"value {copy.value} has two copies on the {copy.tier}", index)
            self.events[copy.end].copies_end.append(index)
        for boundary, events in sorted(self.events.items()):
            for value in events.placements_begin:
                self._check_placement_has_cause(boundary, value)
            for tier, value in events.copies_begin:
                writers = self._transfers_into(events, tier, value)
                if len(writers) > 1:
                    self._fail("copy", f"value {value} is written twice to the {tier}", boundary)
                if not writers and not self._is_carried_into(boundary, value):
                    self._fail(
                        "cause",
                        f"a copy of value {value} on the {tier} begins at boundary {boundary}, "
                        "where no transfer that writes it starts",
                        boundary,
                    )

    def _transfers_into(self, events: BoundaryEvents, tier: Tier, value: int) -> list[int]:
        transfers = ((index, self.plan.transfers[index]) for index in events.transfers_begin)
        return [i for i, t in transfers if t.value == value and t.link.destination == tier]

    def _is_carried_into(self, boundary: int, value: int) -> bool:
        """Return whether a persistent value may be there at the boundary as it was before it."""
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return boundary == 0 and storage.persistent and storage.initial == value

    def _is_input(self, boundary: int, value: int) -> bool:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return boundary == 0 and not storage.persistent and storage.initial == value

    def _check_placement_has_cause(self, boundary: int, value: int) -> None:
        causes = len(self._transfers_into(self.events[boundary], Tier.DEVICE, value))
        causes += value in self.makes[boundary]
        causes += self._is_input(boundary, value)
        if causes > 1:
            self._fail("cause", f"value {value} comes from two places at once", boundary)
        if not causes and not self._is_carried_into(boundary, value):
            self._fail(
                "cause",
                f"value {value} is placed from boundary {boundary}, where no operator makes it and "
                "no transfer that brings it starts",
                boundary,
            )

    # One boundary.

    def _now(self, what: str) -> list[tuple[int, int]]:
        """Return indices of events that end at this boundary, with the step of each."""
        now = self.events.get(self.position)
        later = self.events.get(self.position + self.num_positions)
        ends = [] if now is None else [(index, self.step) for index in getattr(now, what)]
        if later is not None:
            ends += [(index, self.step - 1) for index in getattr(later, what)]
        return ends

    def _cross_boundary(self) -> None:
        """Replay the events at this boundary, before its operator."""
        if self.position == 0:
            self._check_results()
        begin = self.events.get(self.position, _NOTHING)
        self._end_copies(begin)
        leaving = [i for i in begin.transfers_begin if self._leaves(i)]
        for index in leaving:
            self._begin_transfer(index)
        ends = self._now("transfers_end")
        for index, step in ends:
            if not self._enters(index):
                self._end_transfer(index, step)
        self._end_placements(begin)
        if self.position == 0:
            self._check_persistent()
            for value, index in begin.placements_begin.items():
                if self._is_input(0, value):
                    self._place(self.plan.placements[index], writer=None, complete=True)
        for index in begin.transfers_begin:
            if not self._leaves(index):
                self._begin_transfer(index)
        self._check_held_bytes()
        for index, step in ends:
            if self._enters(index):
                self._end_transfer(index, step)

    def _leaves(self, index: int) -> bool:
        return self.plan.transfers[index].link.source == Tier.DEVICE

    def _enters(self, index: int) -> bool:
        return self.plan.transfers[index].link.destination == Tier.DEVICE

    def _begin_transfer(self, index: int) -> None:
        transfer = self.plan.transfers[index]
        version = self._version(transfer.value, self.step)
        source = self.blocks.get((transfer.link.source, version))
        if transfer.num_bytes == 0:
            return
        if source is None or not source.complete:
            if self.strict:
                state = "is not there" if source is None else "is not complete there"
                self._fail(
                    "source",
                    f"transfer {index} is to move value {transfer.value} from the "
                    f"{transfer.link.source}, where it {state}",
                )
        else:
            source.readers.add((index, self.step))
        tier = transfer.link.destination
        begin = self.events[self.position]
        if tier == Tier.DEVICE:
            placement = begin.placements_begin.get(transfer.value)
            if placement is None:
                self._fail(
                    "placement", f"transfer {index} brings value {transfer.value} to no place"
                )
            self._place(self.plan.placements[placement], writer=(index, self.step))
        else:
            copy = begin.copies_begin.get((tier, transfer.value))
            if copy is None:
                self._fail(
                    "copy", f"transfer {index} writes value {transfer.value} to no copy there"
                )
            self._hold(self.plan.copies[copy], writer=(index, self.step))

    def _end_transfer(self, index: int, step: int) -> None:
        transfer = self.plan.transfers[index]
        if transfer.num_bytes == 0:
            return
        version = self._version(transfer.value, step)
        source = self.blocks.get((transfer.link.source, version))
        if source is not None:
            source.readers.discard((index, step))
        target = self.blocks.get((transfer.link.destination, version))
        if target is not None and target.writer == (index, step):
            target.writer, target.complete = None, True
        elif self.strict:
            self._fail("in_flight", f"what transfer {index} writes is gone before it ends")

    # Below the device.

    def _hold(self, copy: Copy, *, writer: TransferRun | None, complete: bool = False) -> None:
        place = (copy.tier, self._version(copy.value, self.step))
        if place in self.blocks:
            self._fail("copy", f"value {copy.value} is on the {copy.tier} already")
        last = self.step * self.num_positions + copy.end
        self.blocks[place] = HeldVersion(0, copy.num_bytes, last, complete=complete, writer=writer)
        self.held_bytes[copy.tier] += copy.num_bytes

    def _end_copies(self, begin: BoundaryEvents) -> None:
        """End copies, except those that go on as others when a step begins."""
        goes_on: dict[VersionPlace, Copy] = {}
        for (tier, value), index in begin.copies_begin.items() if self.position == 0 else ():
            if not self._transfers_into(begin, tier, value):
                place = (tier, self._version(value, self.step))
                goes_on[place] = self.plan.copies[index]
        for index, step in self._now("copies_end"):
            copy = self.plan.copies[index]
            place = (copy.tier, self._version(copy.value, step))
            block = self.blocks.get(place)
            if block is None or not self._ends_here(block):
                continue
            if place in goes_on:
                block.last = self._now_boundary() + goes_on.pop(place).end
                continue
            if block.readers or block.writer is not None:
                self._fail(
                    "in_flight",
                    f"the copy of value {copy.value} on the {copy.tier} ends while a transfer "
                    "reads or writes it; it has to last longer than the transfer",
                )
            del self.blocks[place]
            self.held_bytes[copy.tier] -= copy.num_bytes
        for copy in goes_on.values():
            place = (copy.tier, self._version(copy.value, self.step))
            if self.strict and place not in self.blocks:
                self._fail(
                    "steady_state",
                    f"the step begins with a copy of value {copy.value} on the {copy.tier} and "
                    "does not end with one",
                )
            self._hold(copy, writer=None, complete=True)

    def _check_held_bytes(self) -> None:
        budget = self.plan.budget
        for tier, limit in ((Tier.HOST, budget.host_bytes), (Tier.FILE, budget.file_bytes)):
            if self.held_bytes[tier] > (limit or 0):
                self._fail(
                    f"{tier.value}_budget",
                    f"copies on the {tier} take {self.held_bytes[tier]} bytes; the budget "
                    + (f"is {limit}" if limit is not None else "has no such tier"),
                )

    # On the device.

    def _place(
        self, placement: Placement, *, writer: TransferRun | None, complete: bool = False
    ) -> None:
        version = self._version(placement.value, self.step)
        place = (Tier.DEVICE, version)
        start, end = placement.offset, placement.offset + placement.num_bytes
        if place in self.blocks:
            if self.strict:
                self._fail("placed_twice", f"value {placement.value} is on the device already")
            self._release(place)
        # In every step: a value that the first one places may stay for ever.
        self._check_overlap(placement.value, start, end)
        last = self.step * self.num_positions + placement.end
        self.blocks[place] = HeldVersion(start, end, last, complete=complete, writer=writer)
        bisect.insort(self.addresses, (start, end, version))

    def _check_overlap(self, value: int, start: int, end: int) -> None:
        """Compare a block with both neighbours, before it enters `addresses`."""
        slot = bisect.bisect_left(self.addresses, (start,))
        for other_start, other_end, version in self.addresses[max(slot - 1, 0) : slot + 1]:
            if start < other_end and other_start < end:
                self._fail(
                    "overlap",
                    f"value {value} is to take the bytes {start} to {end}, of which value "
                    f"{version[0]} has {other_start} to {other_end}",
                )

    def _release(self, place: VersionPlace) -> None:
        block = self.blocks.pop(place)
        slot = bisect.bisect_left(self.addresses, (block.start, block.end, place[1]))
        del self.addresses[slot]

    def _end_placements(self, begin: BoundaryEvents) -> None:
        """End placements, except those of operands, which a result may reuse."""
        ends = self._now("placements_end")
        kept = {
            self._version(value, self.step)
            for value in (self.needs[self.position] if ends else ())
            if not self._transfers_into(begin, Tier.DEVICE, value)
        }
        goes_on = {
            self._version(value, self.step): self.plan.placements[index]
            for value, index in (begin.placements_begin.items() if self.position == 0 else ())
            if self._is_carried_into(self.position, value)
            and not self._transfers_into(begin, Tier.DEVICE, value)
        }
        for index, step in ends:
            placement = self.plan.placements[index]
            version = self._version(placement.value, step)
            block = self.blocks.get((Tier.DEVICE, version))
            if block is None or not self._ends_here(block):
                continue
            if version in goes_on:
                self._continue(block, goes_on.pop(version))
            elif version not in kept:
                if block.readers or block.writer is not None:
                    self._fail(
                        "in_flight",
                        f"value {placement.value} loses its place on the device while a transfer "
                        "reads or writes it",
                    )
                self._release((Tier.DEVICE, version))
        for version, placement in goes_on.items():
            if self.strict and (Tier.DEVICE, version) not in self.blocks:
                self._fail(
                    "steady_state",
                    f"the step begins with value {placement.value} on the device and does not "
                    "end with it there",
                )
            self._place(placement, writer=None, complete=True)

    def _continue(self, block: HeldVersion, placement: Placement) -> None:
        """Continue a block as another placement of its version in the next step."""
        if block.start != placement.offset:
            self._fail(
                "steady_state",
                f"value {placement.value} begins the step at byte {placement.offset} and ends it "
                f"at {block.start}",
            )
        block.last = self._now_boundary() + placement.end

    # Operators.

    def _run_operator(self) -> None:
        operator = self.graph.operators[self.plan.order[self.position]]
        needs, mutates = self.needs[self.position], self.mutates[self.position]
        for value in needs:
            self._check_resident(value, operator.name)
        placements = self.events.get(self.position, _NOTHING).placements_begin
        for value in self.makes[self.position]:
            if self.graph.num_bytes(value) and value not in placements:
                self._fail(
                    "placement", f"{operator.name!r} makes value {value}, which has no place"
                )
        reusing = dict(mutates)
        for read, created in operator.may_overwrite:
            old = self.blocks.get(self._device(read))
            if old is None or created not in placements or not self._ends_here(old):
                continue
            if self.plan.placements[placements[created]].offset == old.start:
                reusing[read] = created
        reused: list[tuple[HeldVersion, int | None]] = []
        for value in needs:
            block = self.blocks.get(self._device(value))
            if block is not None and (value in reusing or self._ends_here(block)):
                self._reuse_place(value, block, reusing.get(value), placements, operator.name)
                reused.append((block, reusing.get(value)))
        for value in self.makes[self.position]:
            if self.graph.num_bytes(value):
                placement = self.plan.placements[placements[value]]
                self._check_not_read(placement, reused)
                self._place(placement, writer=None, complete=True)

    def _check_not_read(
        self, placement: Placement, reused: list[tuple[HeldVersion, int | None]]
    ) -> None:
        """Refuse results over operands, unless they reuse the place element for element."""
        end = placement.offset + placement.num_bytes
        for block, new in reused:
            if new != placement.value and placement.offset < block.end and block.start < end:
                self._fail(
                    "overlap",
                    f"value {placement.value} is to take the bytes {placement.offset} to {end}, "
                    f"of which {block.start} to {block.end} are still read",
                )

    def _check_resident(self, value: int, name: str) -> None:
        if not self.strict or not self.graph.num_bytes(value):
            return
        block = self.blocks.get(self._device(value))
        if block is None:
            self._fail("residency", f"{name!r} needs value {value}, which is not on the device")
        if not block.complete:
            self._fail("arrival", f"{name!r} needs value {value}, which has not arrived yet")

    def _reuse_place(
        self, old: int, block: HeldVersion, new: int | None, placements: dict[int, int], name: str
    ) -> None:
        """Let `new` reuse the place of `old`, while the operator runs."""
        if new is None:
            self._fail(
                "residency",
                f"the place of value {old} ends where {name!r} begins, which needs it",
            )
        if not self._ends_here(block):
            self._fail(
                "reuse",
                f"{name!r} writes over value {old}, which keeps its place beyond this operator",
            )
        if self.plan.placements[placements[new]].offset != block.start:
            self._fail(
                "reuse",
                f"{name!r} writes value {new} over value {old} at byte {block.start}, but value "
                f"{new} is not placed there",
            )
        if self.strict and (block.readers or block.writer is not None):
            self._fail("reuse", f"{name!r} writes over value {old}, which is still on its way")
        self._release(self._device(old))

    def _ends_here(self, block: HeldVersion) -> bool:
        return block.last == self._now_boundary()

    def _now_boundary(self) -> int:
        return self.step * self.num_positions + self.position

    # The step boundary.

    def _check_results(self) -> None:
        """Check that results are on the device when the step ends."""
        if self.step < 2:
            return
        for storage in self.graph.storages:
            if storage.final is None or storage.persistent or not storage.num_bytes:
                continue
            block = self.blocks.get((Tier.DEVICE, (storage.final, self.step - 1)))
            if block is None or not block.complete:
                self._fail("loss", f"{storage.name!r} is not on the device when the step ends")

    def _check_persistent(self) -> None:
        """Check that every persistent storage is complete somewhere when a step ends."""
        if self.step < 2:
            return
        for storage in self.graph.storages:
            if storage.persistent and storage.num_bytes and storage.initial is not None:
                version = self._version(storage.initial, self.step)
                blocks = (self.blocks.get((tier, version)) for tier in Tier)
                if not any(block is not None and block.complete for block in blocks):
                    self._fail(
                        "persistent", f"{storage.name!r} is nowhere complete when the step ends"
                    )

    # Names.

    def _version(self, value: int, step: int) -> Version:
        renamed = self.renames.get(value)
        if renamed is None:
            return value, step
        final, is_constant = renamed
        return final, 0 if is_constant else step - 1

    def _device(self, value: int) -> VersionPlace:
        return (Tier.DEVICE, self._version(value, self.step))

    def _fail(self, rule: str, message: str, boundary: int | None = None) -> NoReturn:
        where = self.position if boundary is None else boundary
        raise PlanError(f"boundary {where}: {message}", rule=rule)
