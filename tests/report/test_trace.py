"""The Chrome trace: valid by the format's rules, complete, and true to the timeline's times."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory import Ledger, Link, Span, Tier, Timeline
from penstock.report import chrome_trace, write_chrome_trace

MS = 1_000_000


def check_schema(trace: dict[str, Any]) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    json.loads(json.dumps(trace))
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X", "C"}
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(rows) <= named
    for row in rows.values():
        # A viewer cannot draw spans that overlap in a row; the tolerance is that of the floats.
        row.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(row))


def events_of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def row_names(trace: dict[str, Any]) -> list[str]:
    return [
        event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "thread_name"
    ]


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(
        start_ns=1000 * MS,
        end_ns=1500 * MS,  # the next step began long after this one's work was done
        samples={
            Tier.DEVICE: [(1000 * MS, 0), (1010 * MS, 4096), (1040 * MS, 0)],
            Tier.HOST: [],
            Tier.FILE: [(1000 * MS, 0), (1040 * MS, 4096)],
        },
        spans=[
            Span("stall", "load", 1050 * MS, 1051 * MS),
            Span("compute", "forward", 1000 * MS, 1050 * MS),
            Span("compute", "backward", 1050 * MS, 1100 * MS),
            Span(Link.DEVICE_TO_FILE, "", 1010 * MS, 1040 * MS, 4096),
            Span(Link.DEVICE_TO_FILE, "", 1020 * MS, 1030 * MS, 8192),
            Span(Link.FILE_TO_DEVICE, "", 1050 * MS, 1060 * MS, 4096),
            Span("something new", "x", 1000 * MS, 1001 * MS),
        ],
    )


def test_rows_come_in_order_and_overlapping_transfers_in_two(timeline: Timeline):
    trace = chrome_trace(timeline, title="GPT-2")
    check_schema(trace)
    assert row_names(trace) == [
        "compute",
        "writes device->file 1",
        "writes device->file 2",
        "reads file->device",
        "stalls",
        "something new",
    ]
    (process,) = [event for event in events_of(trace, "M") if event["name"] == "process_name"]
    assert process["args"] == {"name": "GPT-2"}


def test_times_are_microseconds_from_the_start(timeline: Timeline):
    trace = chrome_trace(timeline)
    spans = {event["name"]: event for event in events_of(trace, "X")}
    assert (spans["forward"]["ts"], spans["forward"]["dur"]) == (0, 50_000)
    assert (spans["backward"]["ts"], spans["backward"]["dur"]) == (50_000, 50_000)
    assert spans["file->device"]["args"] == {"bytes": 4096, "bytes_per_second": 409_600}
    assert trace["otherData"]["duration_seconds"] == 0.5


def test_counters_follow_the_tiers_to_the_end(timeline: Timeline):
    counters = events_of(chrome_trace(timeline), "C")
    device = [(c["ts"], c["args"]["bytes"]) for c in counters if c["name"].startswith("device")]
    assert device == [(0, 0), (10_000, 4096), (40_000, 0), (100_000, 0)]
    assert not any(counter["name"].startswith("host") for counter in counters)


def test_a_transfer_from_before_the_step_moves_the_origin(timeline: Timeline):
    timeline.spans.append(Span(Link.DEVICE_TO_FILE, "", 990 * MS, 1005 * MS, 4096))
    trace = chrome_trace(timeline)
    check_schema(trace)
    spans = {event["name"]: event for event in events_of(trace, "X")}
    assert spans["forward"]["ts"] == 10_000


def test_an_empty_timeline():
    empty = Timeline(5, 5, {tier: [] for tier in Tier}, [])
    check_schema(chrome_trace(empty))


def test_a_ledger_to_a_file(tmp_path: Path):
    ledger = Ledger()
    ledger.add(Tier.DEVICE, 4096)
    ledger.record_transfer(Link.DEVICE_TO_FILE, 4096, 10, 20)
    ledger.begin_step()
    path = write_chrome_trace(ledger.timeline(), tmp_path / "new" / "trace.json")
    assert path == tmp_path / "new" / "trace.json"
    trace = json.loads(path.read_text())
    check_schema(trace)
    assert row_names(trace) == ["writes device->file"]


spans = st.builds(
    lambda lane, start, length, num_bytes: Span(lane, "", start, start + length, num_bytes),
    st.sampled_from(["compute", "stall", *Link]),
    st.integers(0, 50),
    st.integers(0, 20),
    st.integers(0, 9),
)


@given(st.lists(spans, max_size=30))
def test_every_span_is_in_the_trace_once(recorded: list[Span]):
    trace = chrome_trace(Timeline(10, 40, {}, recorded))
    check_schema(trace)
    drawn = sorted((e["cat"], round(e["dur"] * 1000)) for e in events_of(trace, "X"))
    assert drawn == sorted((span.lane, span.end_ns - span.start_ns) for span in recorded)
