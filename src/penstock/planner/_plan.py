"""What a plan says: the order of the operators, where every value is when, and what moves.

**Positions.** `order` lists what runs, one operator at a position, N positions in all; an operator
that appears again is recomputed. Everything else is said in positions, never in seconds, so that a
plan is right however long things really take. Position p begins at *boundary* p, in this sequence:

1. The operator at position p - 1 has finished. Copies that end at p are gone. Transfers out of the
   device that start at p may begin.
2. Transfers out of the device (and between host and file) that end at p have finished.
3. Transfers into the device (and between host and file) that start at p may begin.
4. Transfers into the device that end at p have finished. The operator at position p runs.

So bytes that come in at boundary p may take the place of bytes that left by boundary p, and the
operator at p may read them: `start` and `end` of a transfer out of the device or into it may be the
same boundary. What the operator at p makes can leave from boundary p + 1 on, and so can what came
in by boundary p. Transfers on one link run one after the other, in the plan's order; none has to be
finished before one ahead of it may begin.

**Steps repeat.** Boundary N is boundary 0 of the next step: an interval may end beyond N, by at
most N, and then goes on at the beginning of the step, where the value `final` of a persistent
storage is called `initial`. Only such values go beyond N. What begins a step where it was at the
end of the one before (a parameter that never moves) either has one interval beyond N, or two that
meet at the boundary: one ends at N, the other starts at 0, at the same address. What the caller
gives (the value `initial` of storages that are not persistent) is placed from boundary 0 without a
transfer and can leave from boundary 1 on; what he reads (the value `final` of such storages) is
placed up to boundary N.

**Every run has room.** An operator that runs again makes all it made the first time (or, with
`recompute_args`, its `creates`), so each of these has a placement that starts there. Values of no
bytes need neither placements nor copies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.errors import GraphFileError
from penstock.graph import StepGraph, split
from penstock.graph.step_graph import DAMAGES, checksum
from penstock.memory import Link, MachineProfile, Tier
from penstock.tables import report_table

FORMAT = "penstock-plan"
VERSION = 2
_HEADER = ("format", "version", "checksum")


class Placement(NamedTuple):
    """Where a value is on the device.

    Attributes:
        value: Index of the value.
        offset: Its first byte in the arena.
        num_bytes: Bytes that it takes.
        start: It takes them from this boundary: the position of the operator that makes it, or
            the start of the transfer that brings it in.
        end: Up to this boundary, exclusive. A value that an operator at position p turns into
            another in the same place (`Operator.mutates`, `Operator.may_overwrite`) ends at p,
            where the other starts; if it comes in at p just for that, its start is p too.
    """

    value: int
    offset: int
    num_bytes: int
    start: int
    end: int


class Transfer(NamedTuple):
    """A value that moves.

    Attributes:
        value: Index of the value.
        link: The way that it takes.
        num_bytes: Bytes that move.
        start: Boundary at which it may begin.
        end: Boundary by which it has finished; between host and file later than `start`.
    """

    value: int
    link: Link
    num_bytes: int
    start: int
    end: int


class Copy(NamedTuple):
    """Where a value is below the device.

    Attributes:
        value: Index of the value.
        tier: Host or file.
        num_bytes: Bytes that it takes there.
        start: From this boundary: the start of the transfer that writes it. A copy of a value that
            no step changes lives from 0 to N.
        end: Up to this boundary, exclusive; later than the end of every transfer that reads it.
    """

    value: int
    tier: Tier
    num_bytes: int
    start: int
    end: int


class Measured(Protocol):
    """What of a report on steps `penstock.planner.refine` takes up."""

    @property
    def operator_seconds(self) -> Sequence[float | None]:
        """Of each operator of the planned graph; None where nothing runs."""
        ...

    @property
    def bytes_per_second(self) -> Mapping[str, float]:
        """Of each link, by its value; 0 where nothing moved."""
        ...


class Found(NamedTuple):
    """How far a search is.

    Attributes:
        elapsed_seconds: Since it began.
        step_seconds: Of the best plan so far, by the search's own replay.
        lower_bound_seconds: What no plan can beat.
    """

    elapsed_seconds: float
    step_seconds: float
    lower_bound_seconds: float


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Why no plan under the same frozen decisions is faster.

    Attributes:
        seconds: The largest of the bounds.
        binding: Name of the one that is the largest.
        seconds_of: Each bound by name: `"compute"`, `"cut"`, `"persistent"`, `"chain"`,
            `"remaking"`, `"residency_lp"`, `"segments"`, `"windows"`; those that do not hold for
            what was left free are missing.
        reorder: Whether it holds for other orders than the program's.
        recompute: Whether it holds for plans in which operators run again.
    """

    seconds: float
    binding: str
    seconds_of: Mapping[str, float]
    reorder: bool = True
    recompute: bool = True


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan was made for.

    Attributes:
        device_bytes: Of the device, workspace included; None: as much as needed.
        host_bytes: Of the host tier; None: there is no separate one.
        file_bytes: Of the file tier; None: there is none.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step, planned: plain data, checked by `check`, timed by `simulate`.

    Attributes:
        graph_digest: Of the `StepGraph` that it belongs to.
        order: Operators by position.
        placements: Where values are on the device, by their start.
        transfers: What moves; those of one link in the order in which they run.
        copies: Where values are below the device.
        budget: What it was made for.
        machine: What times are based on.
        operator_seconds: Time of each operator of the graph.
        step_seconds: Simulated time of a step once steps repeat.
        ideal_seconds: Time with unlimited memory: each operator once, nothing moves.
        bound: What no plan can beat.
        workspace_bytes: Scratch of the operators, beyond the arena; their largest.
        method: Which planner made it.
        seed: Of its random numbers.
        notes: What else the planner has to say, as the time that it took.
        split_bytes: Operators and values are those of `penstock.graph.split(graph, split_bytes)`;
            None: of the graph itself. `planned_graph` gives the one that counts.
        times: Where `operator_seconds` come from: `"graph"` (its measured times, else a roofline of
            the machine, so that `check` can compare them) or `"given"` (a report on steps that
            ran, or the caller).
    """

    graph_digest: str
    order: tuple[int, ...]
    placements: tuple[Placement, ...]
    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    budget: Budget
    machine: MachineProfile
    operator_seconds: tuple[float, ...]
    step_seconds: float
    ideal_seconds: float
    bound: Bound
    workspace_bytes: int
    method: str
    seed: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    split_bytes: int | None = None
    times: str = "given"

    def __str__(self) -> str:
        """A table of what the plan takes and gives; `repr` has all of it."""
        rows = {
            "step_seconds": self.step_seconds,
            "ideal_seconds": self.ideal_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": f"{self.gap:.1%}",
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_file_bytes": self.peak_file_bytes,
            "bytes_moved": {link.value: count for link, count in self.bytes_moved.items()},
            "num_operators": len(self.order),
            "num_operators_that_run_again": len(self.recomputed),
            "method": self.method,
        }
        return report_table(rows.items(), title="penstock.plan")

    def planned_graph(self, graph: StepGraph) -> StepGraph:
        """Return the graph whose operators and values the plan speaks of.

        Example:
            >>> parts = plan.planned_graph(graph)  # doctest: +SKIP
            >>> parts.operators[plan.order[0]].name  # doctest: +SKIP
            'embedding'

        Args:
            graph: The captured graph that was planned.

        Returns:
            The graph itself, or what `penstock.graph.split` makes of it; made once for a graph.

        Raises:
            GraphFileError: The plan is for another graph, or from another version of Penstock.
        """
        if self.split_bytes is None:
            return graph
        if graph.digest != self.graph_digest:
            raise GraphFileError(_for_another(self.graph_digest, graph.digest))
        parts = split(graph, self.split_bytes)
        if len(parts.operators) != len(self.operator_seconds):
            raise GraphFileError(
                f"this plan is for {len(self.operator_seconds)} operators and this Penstock splits "
                f"the graph into {len(parts.operators)}: plan again"
            )
        return parts

    @property
    def lower_bound_seconds(self) -> float:
        """No plan under the same frozen decisions takes less."""
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """By how much a better plan could at most be faster: step / lower bound - 1."""
        if not self.bound.seconds:
            return 0.0
        # Both are sums of the same numbers, added up in another order.
        return max(0.0, self.step_seconds / self.bound.seconds - 1)

    @property
    def arena_bytes(self) -> int:
        """The end of the highest placement."""
        return max((p.offset + p.num_bytes for p in self.placements), default=0)

    @property
    def peak_device_bytes(self) -> int:
        """What the device has to have: arena and workspace."""
        return self.arena_bytes + self.workspace_bytes

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes of copies on the host at any boundary."""
        return self._peak_copy_bytes(Tier.HOST)

    @property
    def peak_file_bytes(self) -> int:
        """The most bytes of copies in the file at any boundary."""
        return self._peak_copy_bytes(Tier.FILE)

    def _peak_copy_bytes(self, tier: Tier) -> int:
        num_positions = len(self.order)
        change = [0] * (2 * num_positions + 1)
        for copy in self.copies:
            if copy.tier == tier:
                change[copy.start] += copy.num_bytes
                change[copy.end] -= copy.num_bytes
        live, running = [], 0
        for delta in change:
            running += delta
            live.append(running)
        folded = (live[p] + live[p + num_positions] for p in range(num_positions))
        return max(folded, default=0)

    @property
    def bytes_moved(self) -> dict[Link, int]:
        """Bytes per step on each link that is used."""
        moved: dict[Link, int] = {}
        for transfer in self.transfers:
            moved[transfer.link] = moved.get(transfer.link, 0) + transfer.num_bytes
        return moved

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Positions at which an operator runs again."""
        seen: set[int] = set()
        positions = []
        for position, operator in enumerate(self.order):
            if operator in seen:
                positions.append(position)
            seen.add(operator)
        return tuple(positions)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON.

        Returns:
            `order`: operators by position. `offsets`: mappings with `value`, `offset`, `bytes`,
            `start`, `end`. `transfers`: `value`, `link`, `bytes`, `start`, `end`. `copies`:
            `value`, `tier`, `bytes`, `start`, `end`. `recomputed`: positions. All starts and ends
            are boundaries (see `penstock.planner.Plan`). The other fields by their names, times in
            seconds.
        """
        plain = self._content()
        return {"format": FORMAT, "version": VERSION, "checksum": checksum(plain), **plain}

    def _content(self) -> dict[str, Any]:
        return {
            "graph_digest": self.graph_digest,
            "order": list(self.order),
            "offsets": [
                {"value": p.value, "offset": p.offset, "bytes": p.num_bytes}
                | {"start": p.start, "end": p.end}
                for p in self.placements
            ],
            "transfers": [
                {"value": t.value, "link": t.link.value, "bytes": t.num_bytes}
                | {"start": t.start, "end": t.end}
                for t in self.transfers
            ],
            "copies": [
                {"value": c.value, "tier": c.tier.value, "bytes": c.num_bytes}
                | {"start": c.start, "end": c.end}
                for c in self.copies
            ],
            "recomputed": list(self.recomputed),
            "budget": {
                "device_bytes": self.budget.device_bytes,
                "host_bytes": self.budget.host_bytes,
                "file_bytes": self.budget.file_bytes,
            },
            "machine": self.machine.to_dict(),
            "operator_seconds": list(self.operator_seconds),
            "step_seconds": self.step_seconds,
            "ideal_seconds": self.ideal_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": self.gap,
            "bound": {
                "binding": self.bound.binding,
                "seconds_of": dict(self.bound.seconds_of),
                "reorder": self.bound.reorder,
                "recompute": self.bound.recompute,
            },
            "peak_device_bytes": self.peak_device_bytes,
            "workspace_bytes": self.workspace_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_file_bytes": self.peak_file_bytes,
            "bytes_moved": {link.value: count for link, count in self.bytes_moved.items()},
            "method": self.method,
            "seed": self.seed,
            "notes": dict(self.notes),
            "split_bytes": self.split_bytes,
            "times": self.times,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, graph: StepGraph | None = None) -> Plan:
        """Make a plan from what `to_dict` returned, also after a way through JSON.

        Args:
            data: The dictionary.
            graph: The graph that the plan is to be used with, if at hand: a plan for another one
                is refused.

        Raises:
            GraphFileError: It is something else, of another version, damaged, or for another graph.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise GraphFileError(
                f"this is no plan: its 'format' is not {FORMAT!r}; pass what Plan.to_dict() "
                "returned or Plan.save() wrote"
            )
        if type(data.get("version")) is not int or data["version"] != VERSION:
            raise GraphFileError(
                f"this plan has version {data.get('version')!r} of the format and this Penstock "
                f"reads version {VERSION}: plan again"
            )
        try:
            plan = _plan(cls, data)
            found = checksum({name: data[name] for name in data if name not in _HEADER})
        except DAMAGES as error:
            raise GraphFileError(
                f"this plan is damaged ({type(error).__name__}: {error}): plan again"
            ) from error
        if found != data.get("checksum"):
            raise GraphFileError(
                "this plan is damaged: its content does not match its checksum"
                + ("" if "checksum" in data else ", which is missing")
                + "; plan again"
            )
        if graph is not None and graph.digest != plan.graph_digest:
            raise GraphFileError(_for_another(plan.graph_digest, graph.digest))
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, graph: StepGraph | None = None) -> Plan:
        """Read what `save` wrote; `graph` and errors as of `from_dict`."""
        try:
            data = json.loads(Path(path).read_bytes())
        except DAMAGES as error:
            raise GraphFileError(
                f"{os.fspath(path)!r} is no plan or is damaged ({error}): plan again"
            ) from error
        return cls.from_dict(data, graph=graph)


def _for_another(planned: str, given: str) -> str:
    return (
        f"this plan is for the graph {planned[:12]} and not for {given[:12]}, the one given: plan "
        "again for this model, optimizer and batch"
    )


def _plan(cls: type[Plan], data: Mapping[str, Any]) -> Plan:
    budget, bound = data["budget"], data["bound"]
    plan = cls(
        graph_digest=str(data["graph_digest"]),
        order=tuple(map(_integer, data["order"])),
        placements=tuple(
            Placement(_integer(p["value"]), _integer(p["offset"]), *_extent(p))
            for p in data["offsets"]
        ),
        transfers=tuple(
            Transfer(_integer(t["value"]), Link(t["link"]), *_extent(t)) for t in data["transfers"]
        ),
        copies=tuple(
            Copy(_integer(c["value"]), Tier(c["tier"]), *_extent(c)) for c in data["copies"]
        ),
        budget=Budget(**{tier: _optional(num_bytes) for tier, num_bytes in budget.items()}),
        machine=MachineProfile.from_dict(data["machine"]),
        operator_seconds=tuple(map(float, data["operator_seconds"])),
        step_seconds=float(data["step_seconds"]),
        ideal_seconds=float(data["ideal_seconds"]),
        bound=Bound(
            seconds=float(data["lower_bound_seconds"]),
            binding=str(bound["binding"]),
            seconds_of={str(name): float(value) for name, value in bound["seconds_of"].items()},
            reorder=_truth(bound["reorder"]),
            recompute=_truth(bound["recompute"]),
        ),
        workspace_bytes=int(data["workspace_bytes"]),
        method=str(data["method"]),
        seed=int(data["seed"]),
        notes=dict(data["notes"]),
        split_bytes=_optional(data["split_bytes"]),
        times=str(data["times"]),
    )
    if plan.peak_device_bytes != data["peak_device_bytes"]:
        raise ValueError("its placements do not give the peak that it states")
    return plan


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _extent(plain: Mapping[str, Any]) -> tuple[int, int, int]:
    return _integer(plain["bytes"]), _integer(plain["start"]), _integer(plain["end"])


def _optional(value: Any) -> int | None:
    return None if value is None else _integer(value)
