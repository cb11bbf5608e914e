"""Plans as JSON: plain data of a plan, and back, with what makes a file a damaged one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import GraphFileError
from penstock.graph.step_graph import DAMAGES, checksum
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._plan_records import Bound, Budget, Copy, Placement, Transfer

FORMAT = "penstock-plan"
VERSION = 3
_HEADER = ("format", "version", "checksum")


def encode_plan(plan: Any) -> dict[str, Any]:
    """Return a `Plan` as plain data for JSON, headed by format, version and checksum."""
    content = _content(plan)
    return {"format": FORMAT, "version": VERSION, "checksum": checksum(content), **content}


def _content(plan: Any) -> dict[str, Any]:
    return {
        "graph_digest": plan.graph_digest,
        "order": list(plan.order),
        "offsets": [
            {"value": p.value, "offset": p.offset} | _extent_of(p) for p in plan.placements
        ],
        "transfers": [
            {"value": t.value, "link": t.link.value} | _extent_of(t) for t in plan.transfers
        ],
        "copies": [{"value": c.value, "tier": c.tier.value} | _extent_of(c) for c in plan.copies],
        "recomputed": list(plan.recomputed),
        "budget": dataclasses.asdict(plan.budget),
        "machine": plan.machine.to_dict(),
        "operator_seconds": list(plan.operator_seconds),
        "step_seconds": plan.step_seconds,
        "ideal_seconds": plan.ideal_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "bound": {
            "binding": plan.bound.binding,
            "seconds_of": dict(plan.bound.seconds_of),
            "reorder": plan.bound.reorder,
            "recompute": plan.bound.recompute,
        },
        "peak_device_bytes": plan.peak_device_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "peak_host_bytes": plan.peak_host_bytes,
        "peak_file_bytes": plan.peak_file_bytes,
        "bytes_moved": {link.value: count for link, count in plan.bytes_moved.items()},
        "method": plan.method,
        "seed": plan.seed,
        "notes": dict(plan.notes),
        "split_bytes": plan.split_bytes,
        "times": plan.times,
    }


def _extent_of(interval: Placement | Transfer | Copy) -> dict[str, int]:
    return {"bytes": interval.num_bytes, "start": interval.start, "end": interval.end}


def decode_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Plan` from what `encode_plan` returned, after any way through JSON.

    Raises:
        GraphFileError: It is something else, of another version, or damaged.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise GraphFileError(
            f"this is no plan: its 'format' is not {FORMAT!r}; pass what Plan.to_dict() returned "
            "or Plan.save() wrote"
        )
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise GraphFileError(
            f"this plan has version {data.get('version')!r} of the format and this Penstock reads "
            f"version {VERSION}: plan again"
        )
    try:
        fields = _decode_fields(data)
        found = checksum({name: data[name] for name in data if name not in _HEADER})
    except DAMAGES as error:
        raise damage_error(f"{type(error).__name__}: {error}") from error
    if found != data.get("checksum"):
        raise GraphFileError(
            "this plan is damaged: its content does not match its checksum"
            + ("" if "checksum" in data else ", which is missing")
            + "; plan again"
        )
    return fields


def damage_error(reason: str) -> GraphFileError:
    """Return the error of a plan whose content cannot be right."""
    return GraphFileError(f"this plan is damaged ({reason}): plan again")


def read_plan_file(path: str | os.PathLike[str]) -> Any:
    """Read the data of a plan from a file.

    Raises:
        GraphFileError: It is no JSON.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except DAMAGES as error:
        raise GraphFileError(
            f"{os.fspath(path)!r} is no plan or is damaged ({error}): plan again"
        ) from error


def _decode_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    budget, bound = data["budget"], data["bound"]
    return {
        "graph_digest": str(data["graph_digest"]),
        "order": tuple(map(_integer, data["order"])),
        "placements": tuple(
            Placement(_integer(p["value"]), _integer(p["offset"]), *_extent(p))
            for p in data["offsets"]
        ),
        "transfers": tuple(
            Transfer(_integer(t["value"]), Link(t["link"]), *_extent(t)) for t in data["transfers"]
        ),
        "copies": tuple(
            Copy(_integer(c["value"]), Tier(c["tier"]), *_extent(c)) for c in data["copies"]
        ),
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


def _extent(plain: Mapping[str, Any]) -> tuple[int, int, int]:
    return _integer(plain["bytes"]), _integer(plain["start"]), _integer(plain["end"])


def _optional(value: Any) -> int | None:
    return None if value is None else _integer(value)
