"""The time of a planned step once steps repeat: one compute stream and one queue per link.

Time is a consequence of the plan's boundaries (`penstock.planner._plan_records`): a transfer begins
when its boundary has been reached and its link is free; an operator begins when the one before it
has finished and everything that has to be finished by its boundary is. A step that follows another
begins while transfers of the other still run, so the step is repeated until the state at its end
(how far behind each link is, and which transfers are still running) is the one at its beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import PlanError
from penstock.graph import Kind, StepGraph
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._live_ranges import columns_of, occupied_bytes
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Transfer

_TOLERANCE = 1e-12  # of the step: states of successive steps that differ by less are the same
_MAX_STEPS = 100

_End = tuple[int, int]  # transfer, 0 or 1 steps ago


class Stall(NamedTuple):
    """Time in which the device waits for a transfer.

    Attributes:
        position: Position of the operator that waits.
        seconds: Length of the wait.
        transfer: Index of the transfer that it waits for, the last one to finish.
    """

    position: int
    seconds: float
    transfer: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step of a plan in seconds from its beginning, once steps repeat.

    Attributes:
        step_seconds: From the beginning of a step to the beginning of the next.
        positions: Start and end of the operator at each position.
        transfers: Start and end of each transfer; those that cross the end of the step end after
            `step_seconds`.
        stalls: Waits for transfers, by position.
        busy_seconds: Per link: time in which it moves bytes.
        memory_bytes: Per kind: bytes that placements take while the operator at each position runs.
        num_steps: Steps that were simulated until they repeated.
    """

    step_seconds: float
    positions: tuple[tuple[float, float], ...]
    transfers: tuple[tuple[float, float], ...]
    stalls: tuple[Stall, ...]
    busy_seconds: Mapping[Link, float]
    memory_bytes: Mapping[Kind, tuple[int, ...]]
    num_steps: int

    @property
    def stall_seconds(self) -> float:
        """Time of all stalls."""
        return sum(stall.seconds for stall in self.stalls)

    def to_dict(self) -> dict[str, Any]:
        """Return the simulation as plain data for JSON: the fields by name, links and kinds by
        their values, stalls as mappings.
        """
        return {
            "step_seconds": self.step_seconds,
            "positions": [list(interval) for interval in self.positions],
            "transfers": [list(interval) for interval in self.transfers],
            "stalls": [stall._asdict() for stall in self.stalls],
            "stall_seconds": self.stall_seconds,
            "busy_seconds": {link.value: seconds for link, seconds in self.busy_seconds.items()},
            "memory_bytes": {kind.value: list(b) for kind, b in self.memory_bytes.items()},
            "num_steps": self.num_steps,
        }


def simulate(graph: StepGraph, plan: Plan) -> Simulation:
    """Replay a plan in time.

    Example:
        >>> simulate(graph, plan).step_seconds == plan.step_seconds  # doctest: +SKIP
        True

    Args:
        graph: The step.
        plan: A plan for it, whose transfers are valid (`check` says whether they are).

    Returns:
        Times of the operators and transfers, the stalls, and the memory over time.

    Raises:
        PlanError: A transfer waits for one that begins only after it has to be finished (rule
            `"link_order"`), or the machine's profile lacks a link (rule `"link"`).
    """
    replay = _Simulator(plan)
    num_steps = replay.until_steady()
    return replay.result(num_steps, _memory(plan.planned_graph(graph), plan))


def step_seconds_of(
    order: Sequence[int],
    transfers: Sequence[Transfer],
    operator_seconds: Sequence[float],
    machine: MachineProfile,
) -> float:
    """Return the time of a step as `simulate` finds it, before there is a plan."""
    replay = _Simulator(_Timed(tuple(order), tuple(transfers), tuple(operator_seconds), machine))
    replay.until_steady()
    return replay.step_seconds


class _Timed(NamedTuple):
    """The parts of a plan that take time."""

    order: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    operator_seconds: tuple[float, ...]
    machine: MachineProfile


class _Boundary(NamedTuple):
    """A boundary at which something begins or has to be finished, in the sequence of a plan."""

    position: int
    seconds_before: float  # of the operators since the boundary before it in the list
    leaving: list[int]  # transfers out of the device that begin
    left: list[_End]  # finished, not into the device
    others: list[int]  # transfers into the device, or between host and file, that begin
    entered: list[_End]  # finished, into the device


class _Simulator:
    """The steps of a plan, one after the other; times count from the beginning of each step."""

    def __init__(self, plan: Plan | _Timed) -> None:
        self.plan = plan
        self.links = sorted({transfer.link for transfer in plan.transfers})
        self.link_of = [self.links.index(transfer.link) for transfer in plan.transfers]
        self.durations = transfer_seconds(plan)
        self.boundaries, self.seconds_after = _boundaries(plan)
        num_transfers = len(plan.transfers)
        self.free = [0.0] * len(self.links)  # when each link is done with what it has
        self.begun = [0.0] * num_transfers
        self.finished = [0.0] * num_transfers
        self.finished_before = [0.0] * num_transfers  # those of the step before, in today's time
        self.step_seconds = 0.0
        self.stalls: list[Stall] = []
        self.early = [0.0] * num_transfers  # by how much each was finished before it had to be

    def until_steady(self) -> int:
        """Repeat the step until its end is its beginning; return how many steps that took."""
        history: list[tuple[list[float], float]] = []
        crossing = [i for i, t in enumerate(self.plan.transfers) if t.end >= len(self.plan.order)]
        for step in range(1, _MAX_STEPS + 1):
            free = list(self.free)
            self.run_step()
            state = self.free + [self.finished_before[index] for index in crossing]
            close = _TOLERANCE * self.step_seconds
            for back, (earlier, _) in enumerate(reversed(history[-4:])):
                if all(abs(a - b) <= close for a, b in zip(state, earlier, strict=True)):
                    # Steps repeat with a period of back + 1; nearly always that is one step.
                    last = [seconds for _, seconds in history[len(history) - back :]]
                    self.step_seconds = (self.step_seconds + sum(last)) / (back + 1)
                    return step
            history.append((state, self.step_seconds))
            if step > 2:
                self._leap(free, crossing)
        self.step_seconds = sum(seconds for _, seconds in history[-8:]) / 8
        return _MAX_STEPS

    def _leap(self, free: list[float], crossing: list[int]) -> None:
        """Skip steps that differ only in how far a link has fallen behind.

        The time of a step is the cycle time of a max-plus linear system, whatever its state to
        begin with, so a leap changes only how soon the state repeats. A link that falls behind is
        never idle; until an operator waits for it, each step adds the same.
        """
        for link in range(len(self.links)):
            behind = self.free[link] - free[link]
            if behind > _TOLERANCE * self.step_seconds and self.free[link] > 0:
                on_link = (e for e, on in zip(self.early, self.link_of, strict=True) if on == link)
                leap = behind * max(0, int(min(on_link) / behind) - 1)
                self.free[link] += leap
                for index in crossing:
                    if self.link_of[index] == link:
                        self.finished_before[index] += leap

    def run_step(self) -> None:
        """Run one step; afterwards `free` and `finished_before` count from the next one."""
        now = 0.0
        free, begun, finished = self.free, self.begun, self.finished
        link_of, durations, early = self.link_of, self.durations, self.early
        ends = (finished, self.finished_before)
        self.stalls = []
        for position, seconds, leaving, left, others, entered in self.boundaries:
            now += seconds
            reached, cause = now, -1
            for index in leaving:
                link = link_of[index]
                begun[index] = begin = free[link] if free[link] > now else now
                finished[index] = free[link] = begin + durations[index]
            for index, steps_ago in left:
                end = ends[steps_ago][index]
                early[index] = now - end
                if end > now:
                    now, cause = end, index
            for index in others:
                link = link_of[index]
                begun[index] = begin = free[link] if free[link] > now else now
                finished[index] = free[link] = begin + durations[index]
            for index, steps_ago in entered:
                end = ends[steps_ago][index]
                early[index] = now - end
                if end > now:
                    now, cause = end, index
            if cause >= 0:
                self.stalls.append(Stall(position, now - reached, cause))
        now += self.seconds_after
        self.step_seconds = now
        self.free = [time - now for time in free]
        self.finished_before = [time - now for time in finished]

    def result(self, num_steps: int, memory: Mapping[Kind, tuple[int, ...]]) -> Simulation:
        """Return the last step."""
        waits = {stall.position: stall.seconds for stall in self.stalls}
        now, positions = 0.0, []
        for position, operator in enumerate(self.plan.order):
            start = now + waits.get(position, 0.0)
            now = start + self.plan.operator_seconds[operator]
            positions.append((start, now))
        busy = dict.fromkeys(self.links, 0.0)
        for transfer, seconds in zip(self.plan.transfers, self.durations, strict=True):
            busy[transfer.link] += seconds
        return Simulation(
            step_seconds=self.step_seconds,
            positions=tuple(positions),
            transfers=tuple(zip(self.begun, self.finished, strict=True)),
            stalls=tuple(self.stalls),
            busy_seconds=busy,
            memory_bytes=memory,
            num_steps=num_steps,
        )


def transfer_seconds(plan: Plan | _Timed) -> list[float]:
    """Return the time of each transfer: its bytes over the rate of its link."""
    rates = {link: profile.bytes_per_second for link, profile in plan.machine.links.items()}
    for transfer in plan.transfers:
        if transfer.link not in rates:
            raise PlanError(
                f"a transfer takes the link {transfer.link.value!r}, which the profile of machine "
                f"{plan.machine.name!r} does not have: plan for this machine",
                rule="link",
            )
    return [transfer.num_bytes / rates[transfer.link] for transfer in plan.transfers]


def _boundaries(plan: Plan | _Timed) -> tuple[list[_Boundary], float]:
    """Sort transfers by the boundaries at which they begin and have to be finished."""
    num_positions = len(plan.order)
    sides = {
        link: (link.source == Tier.DEVICE, link.destination == Tier.DEVICE)
        for link in {transfer.link for transfer in plan.transfers}
    }
    begins: dict[Link, int] = {}  # a transfer begins after the one before it on its link
    leaving, others = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    left, entered = defaultdict[int, list[_End]](list), defaultdict[int, list[_End]](list)
    for index, (value, link, _, start, end) in enumerate(plan.transfers):
        begin = begins.get(link, 0)
        if start > begin:
            begins[link] = begin = start
        if begin > end:
            raise PlanError(
                f"transfer {index} (value {value}, {link.value}) has to be finished by boundary "
                f"{end}, but one before it on the link begins at {begin}: order the transfers of "
                "a link by the boundaries that wait for them",
                rule="link_order",
            )
        leaves, enters = sides[link]
        (leaving if leaves else others)[begin].append(index)
        ended = (index, 0) if end < num_positions else (index, 1)
        (entered if enters else left)[end % num_positions].append(ended)
    seconds = [plan.operator_seconds[operator] for operator in plan.order]
    boundaries, before = [], 0
    for at in sorted({*leaving, *others, *left, *entered}):
        elapsed = sum(seconds[before:at])
        boundaries.append(_Boundary(at, elapsed, leaving[at], left[at], others[at], entered[at]))
        before = at
    return boundaries, sum(seconds[before:])


def _memory(graph: StepGraph, plan: Plan) -> dict[Kind, tuple[int, ...]]:
    """Return the bytes of placements per kind and position."""
    kinds = [storage.kind for storage in graph.storages]
    rows: dict[Kind, list[tuple[int, int, int]]] = {kind: [] for kind in sorted(set(kinds))}
    for value, _, num_bytes, start, end in plan.placements:
        rows[kinds[graph.storage_of_value[value]]].append((start, end, num_bytes))
    return {
        kind: tuple(occupied_bytes(*columns_of(own), len(plan.order)).tolist())
        for kind, own in rows.items()
    }
