"""The memory of a plan, replayed boundary by boundary over three steps, for `check`.

What is tracked is content: which version of which storage lies, complete, at which place. The
first step only sets the scene: what it carries over its end is believed to be there, though never
two versions at one address. In the two steps after it nothing is believed, and the second of them
begins with what the first one really left.

A version is named by its value and its step; the value `initial` of a persistent storage is the
value `final` of the step before, under which it is filed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from penstock.errors import PlanError
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Copy, Placement

_Version = tuple[int, int]  # value, step
_Run = tuple[int, int]  # transfer, step


@dataclass(slots=True)
class _Block:
    """A version in a place: complete or not, and what moves into and out of it just now."""

    start: int  # address; below the device there are none
    end: int
    last: int  # boundary up to which it is there, counted through all steps
    complete: bool = False
    readers: set[_Run] = field(default_factory=set)  # transfers that read it
    writer: _Run | None = None  # the transfer that writes it


class _Place(NamedTuple):
    tier: Tier
    version: _Version


@dataclass
class _Events:
    """What happens at a boundary; ends that lie in the next step have a boundary beyond N."""

    transfers_begin: list[int] = field(default_factory=list)
    transfers_end: list[int] = field(default_factory=list)
    placements_end: list[int] = field(default_factory=list)
    copies_end: list[int] = field(default_factory=list)
    copies_begin: dict[tuple[Tier, int], int] = field(default_factory=dict)
    placements_begin: dict[int, int] = field(default_factory=dict)


class Replay:
    """Three steps of a plan; `run` raises a `PlanError` where a rule is broken."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.num_positions = len(plan.order)
        self.needs, self.makes, self.mutates = _runs(graph, plan)
        self.strict = False
        self.step = 0
        self.position = 0
        self.blocks: dict[_Place, _Block] = {}
        self.addresses: list[tuple[int, int, _Version]] = []  # taken ones, sorted
        self.held_bytes = {Tier.HOST: 0, Tier.FILE: 0}
        self.events: defaultdict[int, _Events] = defaultdict(_Events)
        self._sort_events()

    def run(self) -> None:
        """Replay a step that is believed, then two that are not."""
        for step in range(3):
            self.step, self.strict = step, step > 0
            for position in range(self.num_positions):
                self.position = position
                self._cross_boundary()
                self._run_operator()
        self.step, self.position = 3, 0
        if self.num_positions:
            self._cross_boundary()

    # What happens when.

    def _sort_events(self) -> None:
        """File what happens under its boundary, and refuse what nothing causes."""
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
                if not writers and not self._carried_into(boundary, value):
                    self._fail(
                        "cause",
                        f"a copy of value {value} on the {tier} begins at boundary {boundary}, "
                        "where no transfer that writes it starts",
                        boundary,
                    )

    def _transfers_into(self, events: _Events, tier: Tier, value: int) -> list[int]:
        transfers = ((index, self.plan.transfers[index]) for index in events.transfers_begin)
        return [i for i, t in transfers if t.value == value and t.link.destination == tier]

    def _carried_into(self, boundary: int, value: int) -> bool:
        """Whether a persistent value may be there at the boundary because it was before."""
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return boundary == 0 and storage.persistent and storage.initial == value

    def _given_by_caller(self, boundary: int, value: int) -> bool:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return boundary == 0 and not storage.persistent and storage.initial == value

    def _check_placement_has_cause(self, boundary: int, value: int) -> None:
        causes = len(self._transfers_into(self.events[boundary], Tier.DEVICE, value))
        causes += value in self.makes[boundary]
        causes += self._given_by_caller(boundary, value)
        if causes > 1:
            self._fail("cause", f"value {value} comes from two places at once", boundary)
        if not causes and not self._carried_into(boundary, value):
            self._fail(
                "cause",
                f"value {value} is placed from boundary {boundary}, where nobody makes it and no "
                "transfer that brings it starts",
                boundary,
            )

    # One boundary.

    def _now(self, what: str) -> list[tuple[int, int]]:
        """Indices of what ends at this boundary, with the step that each belongs to."""
        here = getattr(self.events[self.position], what) if self.position in self.events else []
        now = [(index, self.step) for index in here]
        later = self.position + self.num_positions
        if later in self.events:
            now += [(index, self.step - 1) for index in getattr(self.events[later], what)]
        return now

    def _cross_boundary(self) -> None:
        """What happens at this boundary before its operator."""
        if self.position == 0:
            self._check_results()
        begin = self.events.get(self.position, _Events())
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
            self._place_inputs(begin)
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
        source = self.blocks.get(_Place(transfer.link.source, version))
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
        place = _Place(transfer.link.destination, version)
        begin = self.events[self.position]
        if place.tier == Tier.DEVICE:
            placement = begin.placements_begin.get(transfer.value)
            if placement is None:
                self._fail("room", f"transfer {index} brings value {transfer.value} to no place")
            self._place(self.plan.placements[placement], writer=(index, self.step))
        else:
            copy = begin.copies_begin.get((place.tier, transfer.value))
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
        source = self.blocks.get(_Place(transfer.link.source, version))
        if source is not None:
            source.readers.discard((index, step))
        target = self.blocks.get(_Place(transfer.link.destination, version))
        if target is not None and target.writer == (index, step):
            target.writer, target.complete = None, True
        elif self.strict:
            self._fail("in_flight", f"what transfer {index} writes is gone before it ends")

    # Below the device.

    def _hold(self, copy: Copy, *, writer: _Run | None, complete: bool = False) -> None:
        place = _Place(copy.tier, self._version(copy.value, self.step))
        if place in self.blocks:
            self._fail("copy", f"value {copy.value} is on the {copy.tier} already")
        last = self.step * self.num_positions + copy.end
        self.blocks[place] = _Block(0, copy.num_bytes, last, complete=complete, writer=writer)
        self.held_bytes[copy.tier] += copy.num_bytes

    def _end_copies(self, begin: _Events) -> None:
        """Drop the copies that end here, except those that go on as others at a step's begin."""
        goes_on: dict[_Place, Copy] = {}
        for (tier, value), index in begin.copies_begin.items():
            if not self._transfers_into(begin, tier, value):  # only at boundary 0
                place = _Place(tier, self._version(value, self.step))
                goes_on[place] = self.plan.copies[index]
        for index, step in self._now("copies_end"):
            copy = self.plan.copies[index]
            place = _Place(copy.tier, self._version(copy.value, step))
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
            if self.strict and _Place(copy.tier, self._version(copy.value, self.step)) not in (
                self.blocks
            ):
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

    def _place(self, placement: Placement, *, writer: _Run | None, complete: bool = False) -> None:
        version = self._version(placement.value, self.step)
        place = _Place(Tier.DEVICE, version)
        start, end = placement.offset, placement.offset + placement.num_bytes
        if place in self.blocks:
            if self.strict:
                self._fail("placed_twice", f"value {placement.value} is on the device already")
            self._release(place)
        # In every step: what the first one places may stay for ever and be placed by no other.
        self._check_overlap(placement.value, start, end)
        last = self.step * self.num_positions + placement.end
        self.blocks[place] = _Block(start, end, last, complete=complete, writer=writer)
        bisect.insort(self.addresses, (start, end, version))

    def _check_overlap(self, value: int, start: int, end: int) -> None:
        """Compare with both neighbours: no block enters `addresses` unless it overlaps no other."""
        slot = bisect.bisect_left(self.addresses, (start,))
        for other_start, other_end, version in self.addresses[max(slot - 1, 0) : slot + 1]:
            if start < other_end and other_start < end:
                self._fail(
                    "overlap",
                    f"value {value} is to take the bytes {start} to {end}, of which value "
                    f"{version[0]} has {other_start} to {other_end}",
                )

    def _release(self, place: _Place) -> None:
        block = self.blocks.pop(place)
        slot = bisect.bisect_left(self.addresses, (block.start, block.end, place.version))
        del self.addresses[slot]

    def _end_placements(self, begin: _Events) -> None:
        """Free what ends here, but not what the operator needs: that may be handed over."""
        kept = {
            self._version(value, self.step)
            for value in self.needs[self.position]
            if not self._transfers_into(begin, Tier.DEVICE, value)
        }
        goes_on = {
            self._version(value, self.step): self.plan.placements[index]
            for value, index in begin.placements_begin.items()
            if self._carried_into(self.position, value)
            and not self._transfers_into(begin, Tier.DEVICE, value)
        }
        for index, step in self._now("placements_end"):
            placement = self.plan.placements[index]
            version = self._version(placement.value, step)
            block = self.blocks.get(_Place(Tier.DEVICE, version))
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
                self._release(_Place(Tier.DEVICE, version))
        for version, placement in goes_on.items():
            if self.strict and _Place(Tier.DEVICE, version) not in self.blocks:
                self._fail(
                    "steady_state",
                    f"the step begins with value {placement.value} on the device and does not "
                    "end with it there",
                )
            self._place(placement, writer=None, complete=True)

    def _continue(self, block: _Block, placement: Placement) -> None:
        """A place goes on as another placement of the same version in the next step."""
        if block.start != placement.offset:
            self._fail(
                "steady_state",
                f"value {placement.value} begins the step at byte {placement.offset} and ends it "
                f"at {block.start}",
            )
        block.last = self._now_boundary() + placement.end

    def _place_inputs(self, begin: _Events) -> None:
        for value, index in begin.placements_begin.items():
            if self._given_by_caller(0, value):
                self._place(self.plan.placements[index], writer=None, complete=True)

    # Operators.

    def _run_operator(self) -> None:
        operator = self.graph.operators[self.plan.order[self.position]]
        needs, mutates = self.needs[self.position], self.mutates[self.position]
        for value in needs:
            self._check_resident(value, operator.name)
        placements = self.events.get(self.position, _Events()).placements_begin
        for value in self.makes[self.position]:
            if self.graph.num_bytes(value) and value not in placements:
                self._fail("room", f"{operator.name!r} makes value {value}, which has no place")
        handed = dict(mutates)
        for read, created in operator.may_overwrite:
            old = self.blocks.get(self._device(read))
            if old is None or created not in placements or not self._ends_here(old):
                continue
            if self.plan.placements[placements[created]].offset == old.start:
                handed[read] = created
        taken_over: list[tuple[_Block, int | None]] = []
        for value in needs:
            block = self.blocks.get(self._device(value))
            if block is not None and (value in handed or self._ends_here(block)):
                self._hand_over(value, block, handed.get(value), placements, operator.name)
                taken_over.append((block, handed.get(value)))
        for value in self.makes[self.position]:
            if self.graph.num_bytes(value):
                placement = self.plan.placements[placements[value]]
                self._check_not_read(placement, taken_over)
                self._place(placement, writer=None, complete=True)

    def _check_not_read(
        self, placement: Placement, taken_over: list[tuple[_Block, int | None]]
    ) -> None:
        """A result may lie over an operand only if it takes it over, element for element."""
        end = placement.offset + placement.num_bytes
        for block, new in taken_over:
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

    def _hand_over(
        self, old: int, block: _Block, new: int | None, placements: dict[int, int], name: str
    ) -> None:
        """The place of `old` becomes that of `new`, while the operator runs."""
        if new is None:
            self._fail(
                "residency",
                f"the place of value {old} ends where {name!r} begins, which needs it",
            )
        if not self._ends_here(block):
            self._fail(
                "handover",
                f"{name!r} writes over value {old}, which keeps its place beyond this operator",
            )
        if self.plan.placements[placements[new]].offset != block.start:
            self._fail(
                "handover",
                f"{name!r} writes value {new} over value {old} at byte {block.start}, but value "
                f"{new} is not placed there",
            )
        if self.strict and (block.readers or block.writer is not None):
            self._fail("handover", f"{name!r} writes over value {old}, which is still on its way")
        self._release(self._device(old))

    def _ends_here(self, block: _Block) -> bool:
        return block.last == self._now_boundary()

    def _now_boundary(self) -> int:
        return self.step * self.num_positions + self.position

    # The seam between two steps.

    def _check_results(self) -> None:
        """What the caller reads is on the device when the step ends."""
        if self.step < 2:
            return
        for storage in self.graph.storages:
            if storage.final is None or storage.persistent or not storage.num_bytes:
                continue
            block = self.blocks.get(_Place(Tier.DEVICE, (storage.final, self.step - 1)))
            if block is None or not block.complete:
                self._fail("loss", f"{storage.name!r} is not on the device when the step ends")

    def _check_persistent(self) -> None:
        """Every persistent storage is complete somewhere when a step ends."""
        if self.step < 2:
            return
        for storage in self.graph.storages:
            if storage.persistent and storage.num_bytes and storage.initial is not None:
                version = self._version(storage.initial, self.step)
                blocks = (self.blocks.get(_Place(tier, version)) for tier in Tier)
                if not any(block is not None and block.complete for block in blocks):
                    self._fail(
                        "persistent", f"{storage.name!r} is nowhere complete when the step ends"
                    )

    # Names.

    def _version(self, value: int, step: int) -> _Version:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if storage.persistent and storage.final is not None:
            if storage.initial == storage.final == value:
                return value, 0
            if storage.initial == value:
                return storage.final, step - 1
        return value, step

    def _device(self, value: int) -> _Place:
        return _Place(Tier.DEVICE, self._version(value, self.step))

    def _fail(self, rule: str, message: str, boundary: int | None = None) -> NoReturn:
        where = self.position if boundary is None else boundary
        raise PlanError(f"boundary {where}: {message}", rule=rule)


def _runs(
    graph: StepGraph, plan: Plan
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[tuple[int, int], ...]]]:
    """What is needed, made and written over at each position; a run again may do less."""
    needs, makes, mutates = [], [], []
    seen: set[int] = set()
    for index in plan.order:
        operator = graph.operators[index]
        partly = index in seen and operator.recompute_args is not None
        pairs = () if partly else operator.mutates
        needs.append(tuple(dict.fromkeys(operator.reads + tuple(old for old, _ in pairs))))
        makes.append(operator.creates + tuple(new for _, new in pairs))
        mutates.append(pairs)
        seen.add(index)
    return needs, makes, mutates
