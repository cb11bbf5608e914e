"""A second judge of plans: the bytes of the arena and of the tiers below, as a machine moves them.

Written apart from `check`, from the text of `penstock.planner.Plan` alone. The state at the end of
a step is laid down as the plan says that it is, two steps run from there, and the state after them
has to be the same. Every byte of the arena has an owner and a content; a transfer spoils the bytes
that it writes from the boundary where it may begin to the one where it has ended, and what it reads
has to be whole at both.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.errors import GraphFileError
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Plan

FREE = SPOILT = -1
CELL = 4  # bytes of a number


class Wrong(Exception):
    """The plan is not right, for the reason given."""


def judge(graph: StepGraph, plan: Plan, *, is_planned_graph: bool = False) -> str | None:
    """Return why a plan is wrong; None if it is right. Times and bounds are not looked at.

    `is_planned_graph`: whether the graph is already the one of the plan's own parts.
    """
    try:
        if not is_planned_graph:
            require(plan.graph_digest == graph.digest, "another graph")
            try:
                graph = plan.planned_graph(graph)
            except GraphFileError as error:
                raise Wrong("other parts") from error
        _judge_texts(graph, plan)
        _Machine(graph, plan).run()
    except Wrong as wrong:
        return str(wrong)
    return None


def require(holds: object, reason: str) -> None:
    if not holds:
        raise Wrong(reason)


def _judge_texts(graph: StepGraph, plan: Plan) -> None:
    """What is wrong whatever runs: indices, bytes, intervals, budgets, the order, queues."""
    count, num_values = len(plan.order), len(graph.storage_of_value)
    require(len(plan.operator_seconds) == len(graph.operators), "times of other operators")
    require(all(0 <= s < float("inf") for s in plan.operator_seconds), "a time that is none")
    require(set(plan.order) == set(range(len(graph.operators))), "other operators")
    _judge_order(graph, plan)
    links: dict = {}
    for item in (*plan.placements, *plan.copies, *plan.transfers):
        require(0 <= item.value < num_values, "a value that is none")
        storage = graph.storages[graph.storage_of_value[item.value]]
        require(item.num_bytes == storage.num_bytes, "other bytes")
        lasts = storage.persistent and storage.final == item.value
        is_transfer = hasattr(item, "link")
        require(0 <= item.start < count, "begins outside of the step")
        require(item.end <= item.start + count, "longer than a step")
        require(lasts or item.end < count + (not is_transfer), "goes on unknown")
        least = 1
        if is_transfer:
            ends = (item.link.source, item.link.destination)
            least = 0 if Tier.DEVICE in ends else 1
            require(item.link in plan.machine.links, "no such link")
            queue = links.setdefault(item.link, [0])
            queue[0] = max(queue[0], item.start)
            require(queue[0] <= item.end, "waits for one that begins too late")
        elif hasattr(item, "offset"):
            runs = graph.operators[plan.order[item.start]]
            least = any(item.value == old for old, _ in (*runs.mutates, *runs.may_overwrite)) ^ 1
            require(item.offset >= 0, "below the arena")
        require(item.end >= item.start + least, "no time at all")
    scratch = max([operator.workspace_bytes for operator in graph.operators], default=0)
    require(plan.workspace_bytes == scratch, "another workspace")
    top = max([p.offset + p.num_bytes for p in plan.placements], default=0)
    limit = plan.budget.device_bytes
    require(limit is None or top + scratch <= limit, "beyond the device's budget")


def _judge_order(graph: StepGraph, plan: Plan) -> None:
    """Makers before readers, readers before what overwrites; only some may run twice."""
    first = {index: -1 - back for back, index in enumerate(reversed(plan.order))}
    times = Counter(plan.order)
    made_at: dict[int, int] = {}
    read_at: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        if not operator.recomputable:
            require(times[index] == 1, "runs twice")
        for value in operator.makes:
            made_at[value] = first[index]
        for value in operator.needs:
            read_at.setdefault(value, []).append(first[index])
    for index, operator in enumerate(graph.operators):
        at = first[index]
        require(all(first[earlier] < at for earlier in operator.after), "before what it follows")
        require(all(made_at.get(v, at - 1) < at for v in operator.needs), "before what it needs")
        for old, _ in operator.mutates:
            require(all(other <= at for other in read_at[old]), "overwrites too early")


class _Cells:
    """A number in each cell; runs of cells are compared and written as bytes, at once."""

    def __init__(self, count: int, number: int) -> None:
        self.data = bytearray(self._repeat(number, 0, count))

    def _repeat(self, number: int, first: int, last: int) -> bytes:
        return number.to_bytes(CELL, "little", signed=True) * (last - first)

    def fill(self, first: int, last: int, number: int) -> None:
        self.data[CELL * first : CELL * last] = self._repeat(number, first, last)

    def all_are(self, first: int, last: int, number: int) -> bool:
        return self.data[CELL * first : CELL * last] == self._repeat(number, first, last)


class _Move(NamedTuple):
    """A transfer, with what is asked of it at each of its boundaries."""

    value: int
    start: int
    end: int
    num_bytes: int
    source: Tier
    destination: Tier


class _Claim:
    """Bytes of a tier that hold one version of one value, until a boundary."""

    __slots__ = (
        *("content", "end", "value", "tier"),
        *("first", "last", "serial"),
        *("whole", "reads", "writer", "num_bytes"),
    )

    def __init__(self, content: int, end: int, value: int, tier: Tier) -> None:
        self.content, self.end = content, end  # counted through all steps
        self.value, self.tier = value, tier
        self.first = self.last = self.serial = 0  # cells of the arena, and whose they are
        self.whole = False  # below the device; on it the bytes say so
        self.reads: set[tuple[int, int]] = set()  # transfers that read it now
        self.writer: tuple[int, int] | None = None
        self.num_bytes = 0


class _Machine:
    """An arena of cells, the pieces between all addresses that the plan names, and two tiers."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph, self.plan, self.count = graph, plan, len(plan.order)
        edges = sorted({a for p in plan.placements for a in (p.offset, p.offset + p.num_bytes)})
        self.cell_of = {address: index for index, address in enumerate(edges)}
        self.owner = _Cells(len(edges), FREE)  # by serial number of the claim
        self.content = _Cells(len(edges), SPOILT)
        self.claims: dict[tuple[Tier, int], _Claim] = {}
        self.by_end: dict[int, list[_Claim]] = {}
        self.held = {Tier.HOST: 0, Tier.FILE: 0}
        budget = plan.budget
        self.most = {Tier.HOST: budget.host_bytes or 0, Tier.FILE: budget.file_bytes or 0}
        self.names: dict[tuple[int, int], int] = {}
        self.names_of: dict[int, dict[int, int]] = {step: {} for step in range(-1, 3)}
        self.serial = 0
        self.runs = self._what_runs()
        self.placed, self.copied, self.moves = {}, {}, {}
        for p in plan.placements:
            if p.num_bytes:
                require((p.start, p.value) not in self.placed, "placed twice at once")
                self.placed[p.start, p.value] = p
        for c in plan.copies:
            require((c.start, c.value, c.tier) not in self.copied, "two copies at once")
            self.copied[c.start, c.value, c.tier] = c
        self.transfers = [
            _Move(t.value, t.start, t.end, t.num_bytes, t.link.source, t.link.destination)
            for t in plan.transfers
        ]
        self.brought: dict[int, set[tuple[Tier, int]]] = {}
        for index, t in enumerate(self.transfers):
            out, others = self.moves.setdefault(t.start, ([], []))
            (out if t.source is Tier.DEVICE else others).append(index)
            self.brought.setdefault(t.start, set()).add((t.destination, t.value))
        self.starts_at: dict[int, list] = {}
        for start, value in self.placed:
            self.starts_at.setdefault(start, []).append(value)
        self.open: dict[int, list[tuple[int, int]]] = {}  # transfers by the boundary of their end
        self._judge_causes()

    def _what_runs(self) -> list[tuple]:
        """(needs, makes, in place, may overwrite) at each position; a second run may do less."""
        found, before = [], set()
        for index in self.plan.order:
            o = self.graph.operators[index]
            less = index in before and o.recompute_args is not None
            before.add(index)
            pairs = () if less else o.mutates
            needs = {v for v in (*o.reads, *(old for old, _ in pairs)) if self.graph.num_bytes(v)}
            makes = [v for v in (*o.creates, *(n for _, n in pairs)) if self.graph.num_bytes(v)]
            found.append((needs, makes, pairs, o.may_overwrite, o.name))
        return found

    def _judge_causes(self) -> None:
        """Everything begins because of exactly one thing, and what comes has somewhere to go."""
        brings: dict[tuple, int] = {}
        for t in self.transfers:
            key = t.start, t.value, t.destination
            brings[key] = brings.get(key, 0) + 1
            if t.num_bytes and t.destination is Tier.DEVICE:
                require((t.start, t.value) in self.placed, "brought to no place")
            elif t.num_bytes:
                require(key in self.copied, "written to no copy")
        for key in self.copied:
            require(brings.get(key, 0) <= 1, "written twice")
            require(brings.get(key) or self._lasting(key[0], key[1]), "a copy from nothing")
        for start, value in self.placed:
            causes = brings.get((start, value, Tier.DEVICE), 0)
            causes += value in self.runs[start][1]
            causes += start == 0 and self._given(value)
            require(causes <= 1, "comes twice")
            require(causes or self._lasting(start, value), "comes from nothing")
        for position, (_, makes, *_) in enumerate(self.runs):
            require(all((position, v) in self.placed for v in makes), "made into no place")

    # Names of contents.

    def _storage(self, value: int):
        return self.graph.storages[self.graph.storage_of_value[value]]

    def _lasting(self, start: int, value: int) -> bool:
        storage = self._storage(value)
        return start == 0 and storage.persistent and storage.initial == value

    def _given(self, value: int) -> bool:
        storage = self._storage(value)
        return not storage.persistent and storage.initial == value

    def _name(self, value: int, step: int) -> int:
        """One number for a version of a value, by whatever name two steps know it."""
        known = self.names_of[step]
        name = known.get(value)
        if name is None:
            storage, version = self._storage(value), (value, step)
            if storage.persistent and storage.initial == value and storage.final is not None:
                version = storage.final, -9 if storage.final == value else step - 1
            name = known[value] = self.names.setdefault(version, len(self.names))
        return name

    # Two steps and what is around them.

    def run(self) -> None:
        self._lay_down()
        for step in range(2):
            for position in range(self.count):
                self._cross(step, position)
                self._run(step, position)
        if self.count:
            self._cross(2, 0)

    def _lay_down(self) -> None:
        """What the step before has left, by the plan; nothing of it may overlap either."""
        for index, t in enumerate(self.transfers):
            if t.end >= self.count:
                self.open.setdefault(t.end - self.count, []).append((index, -1))
        coming = {
            (t.destination, self._name(t.value, -1)): (index, -1)
            for index, t in enumerate(self.transfers)
            if t.end >= self.count and t.num_bytes
        }
        for p in self.plan.placements:
            if p.num_bytes and p.end >= self.count:
                claim = self._claim_bytes(p, -1)
                claim.writer = coming.get((Tier.DEVICE, claim.content))
                self._write(claim, SPOILT if claim.writer else claim.content)
        for c in self.plan.copies:
            if c.end >= self.count:
                claim = self._claim_copy(c, -1)
                claim.writer = coming.get((c.tier, claim.content))
                claim.whole = claim.writer is None
        for index, t in enumerate(self.transfers):
            if t.end >= self.count and t.num_bytes:
                source = self.claims.get((t.source, self._name(t.value, -1)))
                if source is not None:
                    source.reads.add((index, -1))

    def _cross(self, step: int, position: int) -> None:
        now = step * self.count + position
        if position == 0:
            self._results(step)
        out, others = self.moves.get(position, ((), ()))
        self._end_copies(step, position, now)
        for index in out:
            self._begin(index, step)
        ended = self.open.pop(now, [])
        for index, when in ended:
            if not self._comes_in(index):
                self._end(index, when)
        self._end_claims(step, position, now)
        if position == 0:
            self._persistent(step)
            for value in self.starts_at.get(0, ()):
                if self._given(value):
                    claim = self._claim_bytes(self.placed[0, value], step)
                    self._write(claim, claim.content)
        for index in others:
            self._begin(index, step)
        require(self.held[Tier.HOST] <= self.most[Tier.HOST], "too much on the host")
        require(self.held[Tier.FILE] <= self.most[Tier.FILE], "too much in the file")
        # What began just now may end just now.
        ended = [each for each in ended if self._comes_in(each[0])] + self.open.pop(now, [])
        for index, when in ended:
            self._end(index, when)

    def _comes_in(self, index: int) -> bool:
        return self.transfers[index].destination is Tier.DEVICE

    # Claims.

    def _claim_bytes(self, p, step: int) -> _Claim:
        first, last = self.cell_of[p.offset], self.cell_of[p.offset + p.num_bytes]
        claim = _Claim(self._name(p.value, step), step * self.count + p.end, p.value, Tier.DEVICE)
        claim.first, claim.last = first, last
        require((Tier.DEVICE, claim.content) not in self.claims, "at two addresses")
        require(self.owner.all_are(first, last, FREE), "bytes that another has")
        self.serial += 1
        claim.serial = self.serial
        self.owner.fill(first, last, self.serial)
        self.content.fill(first, last, SPOILT)
        self._keep(claim)
        return claim

    def _claim_copy(self, c, step: int) -> _Claim:
        claim = _Claim(self._name(c.value, step), step * self.count + c.end, c.value, c.tier)
        claim.num_bytes = c.num_bytes
        if not c.num_bytes:
            return claim
        require((c.tier, claim.content) not in self.claims, "two copies")
        self.held[c.tier] += c.num_bytes
        self._keep(claim)
        return claim

    def _keep(self, claim: _Claim) -> None:
        self.claims[claim.tier, claim.content] = claim
        self.by_end.setdefault(claim.end, []).append(claim)

    def _write(self, claim: _Claim, content: int) -> None:
        is_mine = self.owner.all_are(claim.first, claim.last, claim.serial)
        require(is_mine, "writes into bytes of another")
        self.content.fill(claim.first, claim.last, content)

    def _is_whole(self, claim: _Claim) -> bool:
        if claim.tier is not Tier.DEVICE:
            return claim.whole
        return self.content.all_are(claim.first, claim.last, claim.content)

    def _drop(self, claim: _Claim) -> None:
        require(not claim.reads and claim.writer is None, "gone while it moves")
        del self.claims[claim.tier, claim.content]
        if claim.tier is Tier.DEVICE:
            self.owner.fill(claim.first, claim.last, FREE)
            self.content.fill(claim.first, claim.last, SPOILT)
        else:
            self.held[claim.tier] -= claim.num_bytes

    def _ending(self, now: int, *, on_device: bool) -> list[_Claim]:
        found = [c for c in self.by_end.get(now, ()) if (c.tier is Tier.DEVICE) == on_device]
        return [c for c in found if self.claims.get((c.tier, c.content)) is c]

    def _end_copies(self, step: int, position: int, now: int) -> None:
        brought = self._brought(position)
        go_on = {}
        if position == 0:
            for (start, value, tier), c in self.copied.items():
                if start == 0 and c.num_bytes and (tier, value) not in brought:
                    go_on[tier, self._name(value, step)] = c
        for claim in self._ending(now, on_device=False):
            if (claim.tier, claim.content) not in go_on:
                self._drop(claim)
        self._go_on(go_on, now)

    def _end_claims(self, step: int, position: int, now: int) -> None:
        brought, ending = self._brought(position), self._ending(now, on_device=True)
        needs = self.runs[position][0] if self.count and ending else ()
        stay = {self._name(v, step) for v in needs if (Tier.DEVICE, v) not in brought}
        go_on = {}
        if position == 0:
            for value in self.starts_at.get(0, ()):
                if self._lasting(0, value) and (Tier.DEVICE, value) not in brought:
                    go_on[Tier.DEVICE, self._name(value, step)] = self.placed[0, value]
        for claim in ending:
            if (Tier.DEVICE, claim.content) not in go_on and claim.content not in stay:
                self._drop(claim)
        for (_, content), p in go_on.items():
            claim = self.claims.get((Tier.DEVICE, content))
            if claim is not None:
                require(claim.first == self.cell_of[p.offset], "goes on elsewhere")
        self._go_on(go_on, now)

    def _go_on(self, go_on: dict, now: int) -> None:
        """What is there when the step begins was there when the one before ended, until then."""
        for key, item in go_on.items():
            claim = self.claims.get(key)
            require(claim is not None, "begins a step and was not there")
            require(claim.end == now, "begins a step twice")
            claim.end = now + item.end
            self.by_end.setdefault(claim.end, []).append(claim)

    def _brought(self, position: int) -> set:
        return self.brought.get(position, set())

    # Transfers.

    def _begin(self, index: int, step: int) -> None:
        t = self.transfers[index]
        if not t.num_bytes:
            return
        source = self.claims.get((t.source, self._name(t.value, step)))
        require(source is not None and self._is_whole(source), "moves what is not there")
        source.reads.add((index, step))
        if t.destination is Tier.DEVICE:
            target = self._claim_bytes(self.placed[t.start, t.value], step)
        else:
            target = self._claim_copy(self.copied[t.start, t.value, t.destination], step)
        target.writer = (index, step)
        self.open.setdefault(step * self.count + t.end, []).append((index, step))

    def _end(self, index: int, step: int) -> None:
        t = self.transfers[index]
        if not t.num_bytes:
            return
        content = self._name(t.value, step)
        source = self.claims.get((t.source, content))
        target = self.claims.get((t.destination, content))
        require(source is not None and self._is_whole(source), "spoilt while it moved")
        source.reads.discard((index, step))
        require(target is not None and target.writer == (index, step), "gone before it came")
        target.writer = None
        if target.tier is Tier.DEVICE:
            self._write(target, content)
        else:
            target.whole = True

    # Operators.

    def _run(self, step: int, position: int) -> None:
        now = step * self.count + position
        needs, makes, pairs, may, _ = self.runs[position]
        operands = {}
        for value in needs:
            claim = self.claims.get((Tier.DEVICE, self._name(value, step)))
            require(claim is not None and self._is_whole(claim), "needs what is not there")
            operands[value] = claim
        heirs = {old: new for old, new in pairs if old in operands}
        for old, new in may:
            claim = operands.get(old)
            if claim is None or claim.end != now or (position, new) not in self.placed:
                continue
            if self.cell_of[self.placed[position, new].offset] == claim.first:
                heirs[old] = new
        taken: list[tuple[int, int, int]] = []
        for value, claim in operands.items():
            if value not in heirs:
                require(claim.end != now, "freed as it is needed")
                continue
            place = self.placed[position, heirs[value]]
            require(claim.end == now, "written over and kept")
            require(self.cell_of[place.offset] == claim.first, "written over elsewhere")
            taken.append((claim.first, claim.last, heirs[value]))
            self._drop(claim)
        for value in makes:
            place = self.placed[position, value]
            first, last = self.cell_of[place.offset], self.cell_of[place.offset + place.num_bytes]
            for begin, end, heir in taken:
                require(heir == value or last <= begin or end <= first, "over what is read")
            claim = self._claim_bytes(place, step)
            self._write(claim, claim.content)

    # Between steps.

    def _results(self, step: int) -> None:
        for storage in self.graph.storages:
            if storage.final is None or storage.persistent or not storage.num_bytes or not step:
                continue
            claim = self.claims.get((Tier.DEVICE, self._name(storage.final, step - 1)))
            require(claim is not None and self._is_whole(claim), "a result is not there")

    def _persistent(self, step: int) -> None:
        for storage in self.graph.storages:
            if storage.persistent and storage.num_bytes:
                content = self._name(storage.initial, step)
                claims = [self.claims.get((tier, content)) for tier in Tier]
                require(any(c is not None and self._is_whole(c) for c in claims), "lost")
