"""Tiers, the links between them, and the ledger: bytes resident per tier, bytes moved per link, and
the time the computation waited.

All that moves bytes writes here and every report reads here, so that two numbers about one run
cannot disagree. Writing must be cheap enough for hot paths and safe in destructors: see `_mailbox`.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Literal

from penstock.memory._mailbox import Mailbox

_MAX_EVENTS_PER_STEP = 100_000
_PATIENCE = 64  # events that wait for a reader
_BANDWIDTH_WINDOW = 128  # transfers of a link that its bandwidth is taken from
_NS_PER_SECOND = 1e9


class Tier(enum.StrEnum):
    """Memory with a capacity, in which bytes can be resident.

    On a machine without a GPU `DEVICE` is the RAM that a budget allows, and there is no `HOST`.

    Example:
        >>> Tier("file"), str(Tier.DEVICE)
        (<Tier.FILE: 'file'>, 'device')
    """

    DEVICE = "device"
    HOST = "host"
    FILE = "file"

    __hash__ = str.__hash__  # that of `Enum` is a call in Python


class Link(enum.StrEnum):
    """Direction in which bytes can move between two tiers.

    `DEVICE_TO_FILE` and `FILE_TO_DEVICE` are for machines where the device tier is RAM (or where
    the GPU reads and writes files itself).

    Example:
        >>> Link.HOST_TO_FILE.source, Link.HOST_TO_FILE.destination
        (<Tier.HOST: 'host'>, <Tier.FILE: 'file'>)
    """

    DEVICE_TO_HOST = "device->host"
    HOST_TO_DEVICE = "host->device"
    HOST_TO_FILE = "host->file"
    FILE_TO_HOST = "file->host"
    DEVICE_TO_FILE = "device->file"
    FILE_TO_DEVICE = "file->device"

    source: Tier
    """The tier that the bytes come from."""
    destination: Tier
    """The tier that the bytes go to."""

    def __init__(self, value: str) -> None:
        self.source, self.destination = map(Tier, value.split("->"))

    __hash__ = str.__hash__  # as of `Tier`


# Typed as the strings that tiers and links are: an event carries either, or the name of a lane.
_TIERS: tuple[str, ...] = tuple(Tier)
_LINKS: tuple[str, ...] = tuple(Link)

# Kinds of the ledger's messages.
_ADD, _TRANSFER, _STALL, _SPAN = range(4)
_Event = tuple[int, str, str, int, int, int]  # kind, key, name, start_ns, end_ns, num_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Event that took place in `[start_ns, end_ns)` on one lane of a timeline.

    Attributes:
        lane: `"compute"`, `"stall"` or the value of a `Link`.
        name: Its name, for example `"forward"`; empty for transfers.
        start_ns: Beginning, on the clock of `time.perf_counter_ns`.
        end_ns: End, same clock.
        num_bytes: Bytes moved; 0 where nothing moved.
    """

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of one step: memory per tier over time, and the links' busy times.

    Attributes:
        start_ns: Beginning of the step, on the clock of `time.perf_counter_ns`.
        end_ns: End of the step, same clock.
        samples: For each tier the resident bytes after every change, as `(ns, bytes)`; the first
            sample is what was resident when the step began.
        spans: Computations, transfers and stalls, in the order in which they were recorded.
        num_dropped: Events left out because the step had too many of them.
    """

    start_ns: int
    end_ns: int
    samples: dict[Tier, list[tuple[int, int]]]
    spans: list[Span]
    num_dropped: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain data for JSON: samples as `[ns, bytes]`, spans by name."""
        samples = {str(t): [list(s) for s in taken] for t, taken in self.samples.items()}
        return {**asdict(replace(self, samples={})), "samples": samples}


class _StepEvents:
    """Events of a step as they come; most steps' timelines are never asked for."""

    __slots__ = ("end_ns", "num_dropped", "num_events", "samples", "spans", "start_ns")

    def __init__(self, start_ns: int, samples: dict[str, list[tuple[int, int]]]) -> None:
        self.start_ns = self.end_ns = start_ns
        self.samples = samples
        self.spans: list[tuple[str, str, int, int, int]] = []
        self.num_events = self.num_dropped = 0

    def timeline(self, end_ns: int) -> Timeline:
        """Return what was recorded until now as a timeline that ends at `end_ns`."""
        return Timeline(
            start_ns=self.start_ns,
            end_ns=end_ns,
            samples={tier: list(self.samples[tier]) for tier in Tier},
            spans=[
                Span(str(lane), name, start_ns, end_ns, num_bytes)
                for lane, name, start_ns, end_ns, num_bytes in self.spans
            ],
            num_dropped=self.num_dropped,
        )


class Ledger:
    """Account of bytes and waiting time; thread-safe, of bounded length, 2 microseconds a call.

    The methods that write (`add`, `record_*`) never wait for a lock, so destructors may call them.
    The methods that read see everything that was written before.

    Example:
        >>> ledger = Ledger()
        >>> ledger.add(Tier.DEVICE, 4096)
        >>> ledger.add(Tier.DEVICE, -4096)
        >>> ledger.resident(Tier.DEVICE), ledger.peak(Tier.DEVICE)
        (0, 4096)

    Args:
        max_events_per_step: Samples and spans that a step's timeline keeps; more are counted only.
    """

    def __init__(self, *, max_events_per_step: int = _MAX_EVENTS_PER_STEP) -> None:
        self._mailbox: Mailbox[_Event] = Mailbox(self._apply, patience=_PATIENCE)
        self._max_events_per_step = max_events_per_step
        self._resident_bytes: dict[str, int] = dict.fromkeys(_TIERS, 0)
        self._peak_bytes: dict[str, int] = dict.fromkeys(_TIERS, 0)
        self._moved_bytes: dict[str, int] = dict.fromkeys(_LINKS, 0)
        self._recent: dict[str, deque[tuple[int, int, int]]] = {
            link: deque(maxlen=_BANDWIDTH_WINDOW) for link in _LINKS
        }
        self._stall_ns = 0
        self._last: _StepEvents | None = None
        self._start_recording(time.perf_counter_ns())

    def add(self, tier: Tier, num_bytes: int) -> None:
        """Record that a tier holds `num_bytes` more than before; negative when bytes left."""
        self._mailbox.put((_ADD, tier, "", time.perf_counter_ns(), 0, num_bytes))

    def record_transfer(
        self, link: Link, num_bytes: int, start_ns: int, end_ns: int | None = None
    ) -> None:
        """Record bytes that moved along a link in `[start_ns, end_ns)` of `time.perf_counter_ns`.

        Without an end the transfer has ended now.

        Raises:
            ValueError: The interval ends before it starts.
        """
        end_ns = time.perf_counter_ns() if end_ns is None else end_ns
        self._put(_TRANSFER, link, "", start_ns, end_ns, num_bytes)

    def record_stall(self, reason: str, start_ns: int, end_ns: int) -> None:
        """Record that the computation waited in `[start_ns, end_ns)` of `time.perf_counter_ns`.

        Args:
            reason: Name of the cause, for example `"load"`.
            start_ns: Beginning.
            end_ns: End.

        Raises:
            ValueError: The interval ends before it starts.
        """
        self._put(_STALL, "stall", reason, start_ns, end_ns)

    def record_span(self, lane: str, name: str, start_ns: int, end_ns: int) -> None:
        """Record an event for the timeline.

        Args:
            lane: The lane, for example `"compute"`.
            name: Its name, for example `"forward"`.
            start_ns: Beginning, from `time.perf_counter_ns`.
            end_ns: End, same clock.

        Raises:
            ValueError: The interval ends before it starts.
        """
        self._put(_SPAN, lane, name, start_ns, end_ns)

    def begin_step(self) -> None:
        """End the current step's timeline, which becomes the last one, and start a new one.

        A step during which nothing was recorded is forgotten, so that a call before the first step
        does no harm.
        """
        now = time.perf_counter_ns()
        self._mailbox.read(lambda: self._begin_step(now))

    def resident(self, tier: Tier) -> int:
        """Return the bytes that a tier holds now."""
        return self._mailbox.read(lambda: self._resident_bytes[tier])

    def peak(self, tier: Tier) -> int:
        """Return the most bytes that a tier held since the last `reset_peaks`."""
        return self._mailbox.read(lambda: self._peak_bytes[tier])

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is resident now."""
        self._mailbox.read(lambda: self._peak_bytes.update(self._resident_bytes))

    def moved(self, link: Link) -> int:
        """Return the bytes that moved along a link since the beginning."""
        return self._mailbox.read(lambda: self._moved_bytes[link])

    @property
    def stall_seconds(self) -> float:
        """Seconds that the computation waited since the beginning."""
        return self._mailbox.read(lambda: self._stall_ns / _NS_PER_SECOND)

    def bandwidth(self, link: Link) -> float | None:
        """Return the rate of a link while it was in use, over its recent transfers.

        Returns:
            Bytes per second: bytes of the last 128 transfers over the length of the union of their
            intervals, so that parallel transfers count their time once and idle time does not
            count. None before the first transfer that took measurable time.
        """
        transfers = self._mailbox.read(lambda: sorted(self._recent[link]))
        busy_ns = reached = 0
        for start, end, _ in transfers:
            busy_ns += max(0, end - max(start, reached))
            reached = max(reached, end)
        if busy_ns == 0:
            return None
        return sum(num_bytes for _, _, num_bytes in transfers) * _NS_PER_SECOND / busy_ns

    def timeline(self, which: Literal["last", "current"] = "last") -> Timeline:
        """Return a copy of what was recorded during a step.

        Args:
            which: `"last"`, the last complete step, or `"current"`, the step so far.

        Returns:
            The timeline; an empty one where no step is complete yet.

        Raises:
            ValueError: `which` is something else.
        """
        if which not in ("last", "current"):
            raise ValueError(f'which must be "last" or "current"; got {which!r}')
        now = time.perf_counter_ns()
        if which == "current":
            return self._mailbox.read(lambda: self._recording.timeline(now))
        last = self._mailbox.read(lambda: self._last)
        if last is None:
            return Timeline(now, now, {tier: [] for tier in Tier}, [])
        return last.timeline(last.end_ns)

    def _put(
        self, kind: int, key: str, name: str, start_ns: int, end_ns: int, num_bytes: int = 0
    ) -> None:
        if end_ns < start_ns:
            raise ValueError(
                f"end_ns must not be before start_ns; got start_ns={start_ns}, end_ns={end_ns}; "
                "take both from time.perf_counter_ns"
            )
        self._mailbox.put((kind, key, name, start_ns, end_ns, num_bytes))

    def _begin_step(self, now: int) -> None:
        if self._recording.num_events:
            self._recording.end_ns = now
            self._last = self._recording  # nothing is written to it any more
        self._start_recording(now)

    def _apply(self, event: _Event) -> None:
        kind, key, name, start_ns, end_ns, num_bytes = event
        if kind == _ADD:
            resident_bytes = self._resident_bytes[key] + num_bytes
            self._resident_bytes[key] = resident_bytes
            if resident_bytes > self._peak_bytes[key]:
                self._peak_bytes[key] = resident_bytes
        elif kind == _TRANSFER:
            self._moved_bytes[key] += num_bytes
            self._recent[key].append((start_ns, end_ns, num_bytes))
        elif kind == _STALL:
            self._stall_ns += end_ns - start_ns
        recording = self._recording
        recording.num_events += 1
        if recording.num_events > self._max_events_per_step:
            recording.num_dropped += 1
        elif kind == _ADD:
            recording.samples[key].append((start_ns, self._resident_bytes[key]))
        else:
            recording.spans.append((key, name, start_ns, end_ns, num_bytes))

    def _start_recording(self, now: int) -> None:
        held = self._resident_bytes
        self._recording = _StepEvents(now, {tier: [(now, held[tier])] for tier in _TIERS})
