"""A timeline as a Chrome trace, for the viewer Perfetto, and as lanes, for pictures too.

A lane has rows of spans that do not overlap. Transfers of one link overlap in time (several threads
write at once), and neither a trace viewer nor a picture can draw two overlapping spans in one row.
A lane is therefore split into as few rows as keep its spans apart.

Format: the Trace Event Format (JSON object form) that https://ui.perfetto.dev and chrome://tracing
open. The events are complete events (``X``: a span), counter events (``C``: resident bytes of a
tier) and metadata events (``M``: names and order of the rows). Times are microseconds since the
start of the timeline.
"""

import enum
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.memory import Link, Span, Timeline
from penstock.memory.files import replace_file

# One process holds all rows of a timeline; its number means nothing.
_PROCESS_ID = 1


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
    lanes = []
    for name, spans in spans_by_lane.items():
        kind = _KINDS.get(name, LaneKind.OTHER)
        if kind in (LaneKind.WRITE, LaneKind.READ):
            name = f"{kind} {name}"
        elif kind is not LaneKind.OTHER:
            name = kind.value
        lanes.append(Lane(title=name, kind=kind, rows=_split_rows(spans)))
    kinds = list(LaneKind)
    return sorted(lanes, key=lambda lane: (kinds.index(lane.kind), lane.title))


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


def chrome_trace(timeline: Timeline, *, title: str = "Penstock") -> dict[str, Any]:
    """Turn a timeline into the JSON object that trace viewers open.

    Example:
        >>> trace = chrome_trace(offload.timeline())  # doctest: +SKIP
        >>> trace["displayTimeUnit"]  # doctest: +SKIP
        'ms'

    Args:
        timeline: The timeline, for example that of the last training step.
        title: The name of the process that the viewer shows above the rows.

    Returns:
        A JSON-serialisable object with the key ``"traceEvents"``.
    """
    origin_ns, end_ns = find_bounds(timeline)
    events = [_make_metadata("process_name", name=title)]
    thread_id = 0
    for lane in sort_into_lanes(timeline):
        for row_index, row in enumerate(lane.rows):
            thread_id += 1
            name = lane.title if len(lane.rows) == 1 else f"{lane.title} {row_index + 1}"
            events.append(_make_metadata("thread_name", thread_id, name=name))
            events.append(_make_metadata("thread_sort_index", thread_id, sort_index=thread_id))
            events.extend(_make_span_event(span, thread_id, origin_ns) for span in row)
    for tier, samples in timeline.samples.items():
        # The viewer holds a counter's last value to the end; one closing event marks it.
        closing = [(end_ns, samples[-1][1])] if samples and samples[-1][0] < end_ns else []
        for at_ns, num_bytes in [*samples, *closing]:
            at = _to_microseconds(at_ns - origin_ns)
            events.append(make_counter(f"{tier} resident bytes", at, {"bytes": num_bytes}))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "penstock",
            "duration_seconds": (timeline.end_ns - timeline.start_ns) / 1e9,
            "num_dropped_events": timeline.num_dropped,
        },
    }


def make_counter(name: str, microseconds: float, values: dict[str, int]) -> dict[str, Any]:
    """Make the event of a counter's new values."""
    return {"ph": "C", "name": name, "pid": _PROCESS_ID, "ts": microseconds, "args": values}


def write_chrome_trace(
    timeline: Timeline, path: str | os.PathLike[str], *, title: str = "Penstock"
) -> Path:
    """Write a timeline as a Chrome trace; open the file with https://ui.perfetto.dev.

    Example:
        >>> write_chrome_trace(offload.timeline(), "step.trace.json")  # doctest: +SKIP
        PosixPath('step.trace.json')

    Args:
        timeline: The timeline.
        path: The file to write, replaced if it exists; missing directories are made.
        title: The name of the process that the viewer shows above the rows.

    Returns:
        The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    return write_json(chrome_trace(timeline, title=title), path)


def write_json(trace: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a trace, and make missing directories."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(trace, separators=(",", ":")))
    return path


def _make_metadata(kind: str, thread_id: int = 0, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS_ID, "tid": thread_id, "args": arguments}


def _make_span_event(span: Span, thread_id: int, origin_ns: int) -> dict[str, Any]:
    duration_ns = span.end_ns - span.start_ns
    arguments: dict[str, int | float] = {}
    if span.num_bytes:
        arguments["bytes"] = span.num_bytes
        if duration_ns > 0:
            arguments["bytes_per_second"] = round(span.num_bytes * 1e9 / duration_ns)
    return {
        "ph": "X",
        "name": span.name or span.lane,
        "cat": span.lane,
        "pid": _PROCESS_ID,
        "tid": thread_id,
        "ts": _to_microseconds(span.start_ns - origin_ns),
        "dur": _to_microseconds(duration_ns),
        "args": arguments,
    }


def _to_microseconds(duration_ns: int) -> float:
    return duration_ns / 1000
