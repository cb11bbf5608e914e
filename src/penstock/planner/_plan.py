"""The plan of a training step: plain data, checked by `check`, timed by `simulate`.

`_plan_records.py` defines its parts, and the boundaries between which they last.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import GraphFileError
from penstock.graph import StepGraph, split
from penstock.graph.saved import SavedRecord
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._live_ranges import columns_of, occupied_bytes
from penstock.planner._plan_records import Bound, Budget, Copy, Placement, Transfer
from penstock.tables import report_table


@dataclass(frozen=True, kw_only=True)
class Plan(SavedRecord):
    """A training step, planned: plain data, checked by `check`, timed by `simulate`.

    `to_dict` has the fields by their names, times in seconds, but for `offsets`, the placements:
    mappings with `value`, `offset`, `bytes`, `start`, `end`. `transfers` have `value`, `link`,
    `bytes`, `start`, `end`, and `copies` `value`, `tier`, `bytes`, `start`, `end`. All starts and
    ends are boundaries between operators.

    Attributes:
        graph_digest: Of the `StepGraph` that it belongs to.
        order: Operators by position.
        placements: Values on the device, by their start.
        transfers: Values that move; those of one link in the order in which they run.
        copies: Values below the device.
        budget: Bytes of each tier that it may use.
        machine: Profile that its times are based on.
        operator_seconds: Time of each operator of the graph.
        step_seconds: Simulated time of a step once steps repeat.
        ideal_seconds: Time with unlimited memory: each operator once, nothing moves.
        bound: Lower bound of the time of a step.
        workspace_bytes: The largest workspace of an operator, beyond the arena.
        method: Name of the planner.
        seed: Of its random numbers.
        notes: Other facts of the planner, as the time that it took.
        split_bytes: Operators and values are those of `penstock.graph.split(graph, split_bytes)`;
            None: of the graph itself. `planned_graph` returns the one of the two.
        splits_products: Whether products of matrices are split, too.
        times: Where `operator_seconds` come from: `"graph"` (its measured times, else a roofline of
            the machine, so that `check` can compare them) or `"given"` (a report on steps that
            ran, or the caller).
    """

    _noun = "plan"
    _version = 3

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
    splits_products: bool = False
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
        """Return the graph of the plan's operators and values.

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
        self.check_graph(graph)
        if self.split_bytes is None:
            return graph
        parts = split(graph, self.split_bytes, products=self.splits_products)
        if len(parts.operators) != len(self.operator_seconds):
            raise GraphFileError(
                f"this plan is for {len(self.operator_seconds)} operators and this Penstock splits "
                f"the graph into {len(parts.operators)}: plan again"
            )
        return parts

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds that no plan under the same frozen decisions beats."""
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """Optimality gap, by which a better plan could at most be faster: step / bound - 1."""
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
        """Bytes that the device has to have: arena and workspace."""
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
        copies = [(c.start, c.end, c.num_bytes) for c in self.copies if c.tier == tier]
        return int(occupied_bytes(*columns_of(copies), len(self.order)).max(initial=0))

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

    def _encode(self) -> dict[str, Any]:
        bound = dataclasses.asdict(self.bound)
        del bound["seconds"]
        return {
            "graph_digest": self.graph_digest,
            "order": list(self.order),
            "offsets": list(map(_encode_record, self.placements)),
            "transfers": list(map(_encode_record, self.transfers)),
            "copies": list(map(_encode_record, self.copies)),
            "recomputed": list(self.recomputed),
            "budget": dataclasses.asdict(self.budget),
            "machine": self.machine.to_dict(),
            "operator_seconds": list(self.operator_seconds),
            "step_seconds": self.step_seconds,
            "ideal_seconds": self.ideal_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": self.gap,
            "bound": bound,
            "peak_device_bytes": self.peak_device_bytes,
            "workspace_bytes": self.workspace_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_file_bytes": self.peak_file_bytes,
            "bytes_moved": {link.value: count for link, count in self.bytes_moved.items()},
            "method": self.method,
            "seed": self.seed,
            "notes": dict(self.notes),
            "split_bytes": self.split_bytes,
            "splits_products": self.splits_products,
            "times": self.times,
        }

    @classmethod
    def _decode(cls, content: Mapping[str, Any]) -> Plan:
        plan = cls(**_decode_fields(content))
        if plan.peak_device_bytes != content["peak_device_bytes"]:
            raise ValueError("its peak is another one")
        return plan


def _encode_record(record: Placement | Transfer | Copy) -> dict[str, Any]:
    return {
        name.removeprefix("num_"): value.value if isinstance(value, enum.StrEnum) else value
        for name, value in record._asdict().items()
    }


_PARSERS = {"link": Link, "tier": Tier}


def _decode_record(kind: type[Any], plain: Mapping[str, Any]) -> Any:
    """Return a record of what `_encode_record` returned."""
    return kind(
        *(_PARSERS.get(name, _integer)(plain[name.removeprefix("num_")]) for name in kind._fields)
    )


def _decode_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    budget, bound = data["budget"], data["bound"]
    return {
        "graph_digest": str(data["graph_digest"]),
        "order": tuple(map(_integer, data["order"])),
        "placements": tuple(_decode_record(Placement, plain) for plain in data["offsets"]),
        "transfers": tuple(_decode_record(Transfer, plain) for plain in data["transfers"]),
        "copies": tuple(_decode_record(Copy, plain) for plain in data["copies"]),
        "budget": Budget(**{tier: _optional(num_bytes) for tier, num_bytes in budget.items()}),
        "machine": MachineProfile.from_dict(data["machine"]),
        "operator_seconds": tuple(map(float, data["operator_seconds"])),
        "step_seconds": float(data["step_seconds"]),
        "ideal_seconds": float(data["ideal_seconds"]),
        "bound": Bound(
            seconds=float(data["lower_bound_seconds"]),
            binding=str(bound["binding"]),
            seconds_of={str(name): float(value) for name, value in bound["seconds_of"].items()},
            reorder=_truth(bound["reorder"]),
            recompute=_truth(bound["recompute"]),
        ),
        "workspace_bytes": int(data["workspace_bytes"]),
        "method": str(data["method"]),
        "seed": int(data["seed"]),
        "notes": dict(data["notes"]),
        "split_bytes": _optional(data["split_bytes"]),
        "splits_products": _truth(data.get("splits_products", False)),
        "times": str(data["times"]),
    }


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else _integer(value)
