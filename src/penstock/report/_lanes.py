"""Lanes of a timeline: rows of spans that do not overlap, for traces and pictures.

Transfers of one link overlap in time (several threads write at once), and neither a trace viewer
nor a picture can draw two overlapping spans in one row. A lane is therefore split into as few rows
as keep its spans apart.
"""

import enum
from dataclasses import dataclass

from penstock.memory import Link, Span, Timeline


class LaneKind(enum.StrEnum):
    """Kinds of lanes, in their order from top to bottom."""

    COMPUTE = "compute"
    WRITE = "writes"
    READ = "reads"
    STALL = "stalls"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One lane of a timeline: the spans of one link, of the computation, or of its stalls."""

    title: str
    """The text beside the lane, such as ``"writes device->file"``."""
    kind: LaneKind
    """The kind of the lane; decides colour and order."""
    rows: tuple[tuple[Span, ...], ...]
    """The lane's spans; no two spans of a row overlap, and each row is sorted by start."""


# Away from the device is a write, towards it a read: the same two words on every machine.
_KINDS: dict[str, LaneKind] = {
    "compute": LaneKind.COMPUTE,
    **dict.fromkeys((Link.DEVICE_TO_HOST, Link.DEVICE_TO_FILE, Link.HOST_TO_FILE), LaneKind.WRITE),
    **dict.fromkeys((Link.FILE_TO_HOST, Link.FILE_TO_DEVICE, Link.HOST_TO_DEVICE), LaneKind.READ),
    "stall": LaneKind.STALL,
}


def sort_into_lanes(timeline: Timeline) -> list[Lane]:
    """Sort a timeline's spans into lanes: compute, writes, reads, stalls, then the rest by name."""
    spans_by_lane: dict[str, list[Span]] = {}
    for span in timeline.spans:
        spans_by_lane.setdefault(span.lane, []).append(span)
    kinds = list(LaneKind)
    lanes = [_make_lane(name, spans) for name, spans in spans_by_lane.items()]
    return sorted(lanes, key=lambda lane: (kinds.index(lane.kind), lane.title))


def _make_lane(name: str, spans: list[Span]) -> Lane:
    kind = _KINDS.get(name, LaneKind.OTHER)
    if kind in (LaneKind.WRITE, LaneKind.READ):
        name = f"{kind} {name}"
    elif kind is not LaneKind.OTHER:
        name = kind.value
    return Lane(title=name, kind=kind, rows=_split_rows(spans))


def _split_rows(spans: list[Span]) -> tuple[tuple[Span, ...], ...]:
    """Split spans into the fewest rows (greedy interval partitioning, in order of start)."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return tuple(tuple(row) for row in rows)


def find_bounds(timeline: Timeline) -> tuple[int, int]:
    """Return the start of the first record of a timeline and the end of the last one, in ns.

    A transfer may have begun in the step before. The end of the step is left out if there are
    records: a step lasts until the next one begins, and the work of the loop in between (the
    optimizer, reading data, waiting) does not belong to the picture.
    """
    sampled = [at_ns for samples in timeline.samples.values() for at_ns, _ in samples]
    start_ns = min([timeline.start_ns, *sampled, *(span.start_ns for span in timeline.spans)])
    if not timeline.spans:
        return start_ns, max([timeline.end_ns, *sampled])
    return start_ns, max([*sampled, *(span.end_ns for span in timeline.spans)])
