"""A timeline as a Chrome trace, for the viewer Perfetto.

Format: the Trace Event Format (JSON object form) that https://ui.perfetto.dev and chrome://tracing
open. The events are complete events (``X``: a span), counter events (``C``: resident bytes of a
tier) and metadata events (``M``: names and order of the rows). Times are microseconds since the
start of the timeline.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.memory import Span, Timeline
from penstock.report._lanes import find_bounds, sort_into_lanes

# One process holds all rows of a timeline; its number means nothing.
_PROCESS_ID = 1


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
    events += _make_counters(timeline, origin_ns, end_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "penstock",
            "duration_seconds": (timeline.end_ns - timeline.start_ns) / 1e9,
            "num_dropped_events": timeline.num_dropped,
        },
    }


def _make_counters(timeline: Timeline, origin_ns: int, end_ns: int) -> Iterator[dict[str, Any]]:
    for tier, samples in timeline.samples.items():
        # The viewer holds a counter's last value to the end; one closing event marks it.
        closing = [(end_ns, samples[-1][1])] if samples and samples[-1][0] < end_ns else []
        for at_ns, num_bytes in [*samples, *closing]:
            at = _to_microseconds(at_ns - origin_ns)
            yield make_counter(f"{tier} resident bytes", at, {"bytes": num_bytes})


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
    with path.open("w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))
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
