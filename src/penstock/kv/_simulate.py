"""Simulation of the device tier: hit rates and bytes of recorded selections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from penstock.kv._residency import RecordResidency
from penstock.kv._reuse import Ids
from penstock.tables import Report
from penstock.units import parse_bytes, parse_count

_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class SimulationReport(Report, title="kv.simulate"):
    """Hits, misses and bytes of a trace under one policy.

    Attributes:
        policy: Name of the policy.
        num_slots: Records that fit the device tier.
        record_bytes: Bytes of a record.
        num_steps: Steps of the trace.
        num_records: Different records that it reads.
        num_hits: Reads of resident records.
        num_misses: Reads of others.
        num_admitted: Misses after which the record got a slot; the rest is read where it lies.
        hit_rate: Share of hits in all reads; 1 if there are none.
        hit_bytes: Bytes read from the device tier.
        fetched_bytes: Bytes moved from the tiers below, once per miss.
    """

    policy: str
    num_slots: int
    record_bytes: int
    num_steps: int
    num_records: int
    num_hits: int
    num_misses: int
    num_admitted: int
    hit_rate: float
    hit_bytes: int
    fetched_bytes: int


def simulate(
    trace: Sequence[ArrayLike],
    *,
    slots: int | None = None,
    budget: int | str | None = None,
    policy: str = "penstock",
    record_bytes: int = 1,
    half_life: float = 64,
) -> SimulationReport:
    """Replay a recorded selection over a device tier of a given size.

    Example:
        >>> scan = [[step % 4] for step in range(400)]
        >>> [simulate(scan, slots=3, policy=name).num_hits for name in ("penstock", "lru")]
        [297, 0]

    Args:
        trace: Steps; each an integer array of the records that it reads, at least 0. A record that
            a step names twice is read once.
        slots: Records that fit the device tier; or give `budget`.
        budget: Bytes of the device tier, as 4096 or "8GiB"; holds `budget // record_bytes` records.
        policy: "penstock" (the residency of the block pool), "lru" (admits every miss, evicts the
            least recently used) or "belady" (knows the future: keeps of all records that are
            resident or read those that are read again first. The most hits that any policy can
            have, with the right to admit none).
        record_bytes: Bytes of a record, for the byte counts.
        half_life: Of "penstock", in steps; see `RecordResidency`.

    Returns:
        Counts of the whole trace; the tier is empty at its beginning.

    Raises:
        ValueError: The policy is unknown, not exactly one of `slots` and `budget` is given, or one
            is negative.

    Source:
        Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(map(repr, _POLICIES))}; got {policy!r}")
    num_slots = _count_slots(slots, budget, record_bytes)
    steps = [np.unique(_as_ids(step)) for step in trace]
    if any(step.size and step[0] < 0 for step in steps):
        raise ValueError("records must be at least 0")
    read = np.unique(np.concatenate(steps)) if steps else np.empty(0, dtype=np.int64)
    # Dense numbers: the tables of the policies are as long as the largest.
    steps = [np.searchsorted(read, step) for step in steps]
    few_slots = min(num_slots, len(read))  # tables are as long as the slots
    num_hits, num_admitted = _POLICIES[policy](steps, few_slots, len(read), half_life)
    num_reads = sum(len(step) for step in steps)
    return SimulationReport(
        policy=policy,
        num_slots=num_slots,
        record_bytes=record_bytes,
        num_steps=len(steps),
        num_records=len(read),
        num_hits=num_hits,
        num_misses=num_reads - num_hits,
        num_admitted=num_admitted,
        hit_rate=num_hits / num_reads if num_reads else 1.0,
        hit_bytes=num_hits * record_bytes,
        fetched_bytes=(num_reads - num_hits) * record_bytes,
    )


def _as_ids(step: ArrayLike) -> Ids:
    ids = np.asarray(step)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"a step must be whole numbers of records; got {ids.dtype}: {ids[:5]}")
    return ids.astype(np.int64)


def _count_slots(slots: int | None, budget: int | str | None, record_bytes: int) -> int:
    record_bytes = parse_count(record_bytes, name="record_bytes", least=1)
    if slots is None and budget is not None:
        return parse_bytes(budget, name="budget") // record_bytes
    if slots is None or budget is not None:
        raise ValueError(f"give one of slots and budget; got slots={slots!r}, budget={budget!r}")
    return parse_count(slots, name="slots")


def _run_residency(
    steps: list[Ids], num_slots: int, num_records: int, half_life: float
) -> tuple[int, int]:
    residency = RecordResidency(num_slots, half_life=half_life, num_records=num_records)
    num_hits = num_admitted = 0
    for ids in steps:
        missing = ids[residency.look_up(ids) < 0]
        num_hits += len(ids) - len(missing)
        residency.touch(ids)
        num_admitted += len(residency.admit(missing)[0])
    return num_hits, num_admitted


def _keep_first(
    steps: list[Ids], num_slots: int, num_records: int, keys_of_step: Callable[[int], Ids]
) -> tuple[int, int]:
    """Keep, after every step, the resident and read records whose key is least.

    `keys_of_step(i)` are the new keys of the records that step i reads, as `steps[i]`.
    """
    key = np.full(num_records, _NEVER, dtype=np.int64)
    is_resident = np.zeros(num_records, dtype=bool)
    resident = np.empty(0, dtype=np.int64)
    num_hits = num_admitted = 0
    for step, ids in enumerate(steps):
        is_hit = is_resident[ids]
        num_hits += int(is_hit.sum())
        key[ids] = keys_of_step(step)
        kept = np.concatenate([resident, ids[~is_hit]])
        if len(kept) > num_slots:
            kept = kept[np.argsort(key[kept], kind="stable")[:num_slots]]
        num_admitted += int((~is_resident[kept]).sum())
        is_resident[resident] = False
        is_resident[kept] = True
        resident = kept
    return num_hits, num_admitted


def _run_lru(
    steps: list[Ids], num_slots: int, num_records: int, half_life: float
) -> tuple[int, int]:
    return _keep_first(steps, num_slots, num_records, lambda step: np.full_like(steps[step], -step))


def _run_belady(
    steps: list[Ids], num_slots: int, num_records: int, half_life: float
) -> tuple[int, int]:
    next_read = np.full(num_records, _NEVER, dtype=np.int64)
    keys = [np.empty(0, dtype=np.int64)] * len(steps)
    for step in reversed(range(len(steps))):
        keys[step] = next_read[steps[step]]
        next_read[steps[step]] = step
    return _keep_first(steps, num_slots, num_records, keys.__getitem__)


_POLICIES: dict[str, Callable[[list[Ids], int, int, float], tuple[int, int]]] = {
    "penstock": _run_residency,
    "lru": _run_lru,
    "belady": _run_belady,
}
