"""A step over several devices: plain data, checked by `check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.graph.saved import SavedRecord
from penstock.graph.step_graph import StepGraph
from penstock.memory import MachineProfile
from penstock.tables import report_table


class Collective(NamedTuple):
    """Ranks of a level exchange one operand or result of an operator.

    Attributes:
        operator: Index of the operator.
        value: Index of the value.
        kind: `"all_gather"`, `"all_to_all"`, `"reduce_scatter"`, `"all_reduce"`, or `"halo"` (rows
            of neighbours).
        level: Level of the mesh.
        num_bytes: Bytes that a rank receives.
        is_result: Whether the value is made by the operator; else it reads it.
    """

    operator: int
    value: int
    kind: str
    level: int
    num_bytes: float
    is_result: bool


class FrontierPoint(NamedTuple):
    """A partition that no other found beats in both memory and exchange.

    Attributes:
        peak_device_bytes: Of the fullest rank, as the search counts it, times the ratio in which
            the chosen partition's rank needs more.
        exchanged_bytes: Received by a rank in a step.
        mesh: Ranks of each level.
    """

    peak_device_bytes: int
    exchanged_bytes: int
    mesh: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Partition(SavedRecord):
    """A training step over several devices: plain data, checked by `penstock.partitioner.check`.

    Every rank runs every operator, on its pieces. At each level of the mesh, a storage rests split
    along one of its axes, replicated, or as partial sums, and an operator runs on a piece of one of
    its axes, on everything, or on partial sums.

    Attributes:
        graph_digest: Of the `StepGraph` that it belongs to.
        mesh: Ranks of each level, the outermost first; their product is the number of devices.
        placements: For each storage and level: the stride of the axis that is split, in elements of
            the storage; 0: replicated; -1: partial sums.
        splits: For each operator and level: the letter of the axis (`penstock.partitioner.axes`)
            that is split; `""`: all ranks do the same; `"+"`: it runs on partial sums.
        collectives: One by one, in the order of the operators.
        device_bytes: The budget of a rank; None: as many as needed.
        peak_device_bytes: Bytes that the fullest rank needs.
        exchanged_bytes: Bytes that a rank receives in a step, over all collectives.
        lower_bound_bytes: No partition within the budget exchanges less.
        step_seconds: Predicted time of a step: operators and exchange one after the other.
        exchange_seconds: The part of it that is exchange.
        frontier: Partitions of more memory and less exchange, and of less and more.
        unknown: Operators that the axis table does not have, with the bytes that each reads and
            writes on every rank: they are not split.
        machine: Profile of a device and its links.
        seed: Kept in the result; the search draws no random numbers yet.
        notes: Other facts of the search.
    """

    _noun = "partition"
    _version = 1

    graph_digest: str
    mesh: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]
    splits: tuple[tuple[str, ...], ...]
    collectives: tuple[Collective, ...]
    device_bytes: int | None
    peak_device_bytes: int
    exchanged_bytes: int
    lower_bound_bytes: int
    step_seconds: float
    exchange_seconds: float
    frontier: tuple[FrontierPoint, ...]
    unknown: Mapping[str, int]
    machine: MachineProfile
    seed: int
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of ranks."""
        product = 1
        for size in self.mesh:
            product *= size
        return product

    def placement(self, graph: StepGraph, value: int) -> tuple[int, ...]:
        """Return the placement of a value: that of its storage."""
        return self.placements[graph.storage_of_value[value]]

    def count_collectives(self) -> dict[str, tuple[int, int]]:
        """Return for each kind of collective their number and the bytes that a rank receives."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.collectives:
            number, num_bytes = found.get(each.kind, (0, 0))
            found[each.kind] = number + 1, num_bytes + round(each.num_bytes)
        return found

    def __str__(self) -> str:
        """A table of what it takes and gives; `repr` has all of it."""
        rows: list[tuple[str, object]] = [
            ("devices", self.devices),
            ("mesh", " x ".join(map(str, self.mesh))),
            ("device_bytes", self.device_bytes),
            ("peak_device_bytes", self.peak_device_bytes),
            ("exchanged_bytes", self.exchanged_bytes),
            ("lower_bound_bytes", self.lower_bound_bytes),
            ("step_seconds", self.step_seconds),
            ("exchange_seconds", self.exchange_seconds),
        ]
        rows += [
            (f"{kind} ({number})_bytes", num_bytes)
            for kind, (number, num_bytes) in sorted(self.count_collectives().items())
        ]
        if self.unknown:
            names = ", ".join(sorted(self.unknown))
            rows.append(("not split", f"{names}: not in the axis table"))
        if not self.notes.get("is_written", True):
            rows.append(("not runnable", "an operator cannot run as it is split: apply refuses it"))
        return report_table(rows, title="penstock.partition")

    def _encode(self) -> dict[str, Any]:
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        named["machine"] = self.machine.to_dict()
        named["collectives"] = [each._asdict() for each in self.collectives]
        named["frontier"] = [{**each._asdict(), "mesh": [*each.mesh]} for each in self.frontier]
        named["placements"] = [[*each] for each in self.placements]
        named["splits"] = [[*each] for each in self.splits]
        named["mesh"] = [*self.mesh]
        named["unknown"], named["notes"] = dict(self.unknown), dict(self.notes)
        return named

    @classmethod
    def _decode(cls, content: Mapping[str, Any]) -> Partition:
        frontier = [{**each, "mesh": tuple(each["mesh"])} for each in content["frontier"]]
        decoded = {
            **content,
            "mesh": tuple(map(int, content["mesh"])),
            "placements": tuple(tuple(map(int, each)) for each in content["placements"]),
            "splits": tuple(tuple(map(str, each)) for each in content["splits"]),
            "collectives": tuple(Collective(**each) for each in content["collectives"]),
            "frontier": tuple(FrontierPoint(**each) for each in frontier),
            "unknown": {str(key): int(each) for key, each in content["unknown"].items()},
            "machine": MachineProfile.from_dict(content["machine"]),
        }
        return cls(**decoded)
