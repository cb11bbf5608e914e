"""Which saved storages leave: all that may, or as many as the links can hide.

The amount is a prefix of what a step saves, in bytes: what is saved first is needed last, so the
beginning of the forward pass has the longest time to leave and to return, and the tail stays
(SSDTrain, arXiv 2408.10013, section III; there the condition is an inequality over one bandwidth,
here the two links are simulated with their own rates against the times of the last step).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence

from penstock.units import format_bandwidth, format_bytes

_TOLERANCE = 0.01  # of the step's duration: what the plan may lose to waiting
_RATE_MARGIN = 0.9  # rates fluctuate; plan with less than was measured
_MAX_KINDS = 16  # kinds of step remembered (models trained in turn, batch shapes)


@dataclasses.dataclass(slots=True)
class SavedEntry:
    """One storage in the profile of a step; times in seconds on a clock that stops at stalls."""

    num_bytes: int
    packed_seconds: float
    offloadable: bool
    used_seconds: float | None = None  # first needed by the backward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Measured rates of the two directions, bytes per second; None before the first transfer."""

    write_bytes_per_second: float | None
    read_bytes_per_second: float | None


class Policy:
    """Offloads everything eligible (`policy="all"`), blocking where the store is slower."""

    name = "all"
    learning = True  # whether the pack hook waits for the store instead of piling up writes
    insists = True  # whether a backward pass that follows at once waits for the writes to start

    def __init__(self) -> None:
        self.reason = "every eligible storage leaves, as policy='all' asks"

    def begin_step(self) -> None:
        """A new step starts."""

    def wants(self, num_bytes: int, in_backward: bool) -> bool:
        """Whether the storage being saved should leave."""
        return True

    def learn(self, entries: Sequence[SavedEntry], rates: LinkRates) -> None:
        """Take in the profile of the step that ended."""


class AutoPolicy(Policy):
    """Offloads the longest prefix that returns in time, or what the device budget demands.

    The first step offloads everything and is profiled; every later one is planned from the last
    step of its kind (recognised by its first offloadable storage).
    """

    name = "auto"
    insists = False

    def __init__(
        self, *, device_memory: int | None, in_flight_bytes: int, window_bytes: int
    ) -> None:
        self.reason = "no step has ended yet; the first one offloads everything and is measured"
        self.learning = True
        self._device_memory = device_memory
        self._in_flight_bytes = in_flight_bytes
        self._window_bytes = window_bytes
        self._amounts: OrderedDict[int, int] = OrderedDict()  # kind of step -> bytes to offload
        self._last_amount: int | None = None
        self._amount: int | None = None  # of the step under way; None: everything
        self._kind: int | None = None
        self._offloaded = 0

    def begin_step(self) -> None:
        """Forget the position in the step that ended."""
        self._kind = None
        self._offloaded = 0

    def wants(self, num_bytes: int, in_backward: bool) -> bool:
        """Whether the storage belongs to the prefix of this step that leaves.

        What is saved during a backward pass (a recomputed region, double backward) is needed next
        and stays.
        """
        if in_backward:
            return False
        if self._kind is None:
            self._kind = num_bytes
            self._amount = self._amounts.get(num_bytes, self._last_amount)
            self.learning = self._amount is None
        if self._amount is not None and self._offloaded + num_bytes > self._amount:
            self._offloaded = max(self._offloaded, self._amount)  # a prefix: nothing after it
            return False
        self._offloaded += num_bytes
        return True

    def learn(self, entries: Sequence[SavedEntry], rates: LinkRates) -> None:
        """Plan the next step of this kind from the profile of the one that ended."""
        if self._kind is None:
            return
        total = sum(entry.num_bytes for entry in entries)
        eligible = [entry for entry in entries if entry.offloadable]
        if self._device_memory is not None:
            amount = self._demanded(total, self._device_memory)
        elif rates.write_bytes_per_second is None:
            return  # nothing was written: not enough to plan with
        else:
            if rates.read_bytes_per_second is None:  # all was handed back before it had left
                rates = dataclasses.replace(
                    rates, read_bytes_per_second=rates.write_bytes_per_second
                )
            count = hidden_prefix(eligible, rates, window_bytes=self._window_bytes)
            amount = sum(entry.num_bytes for entry in eligible[:count])
            self._explain(amount, total, rates)
        self._amounts[self._kind] = self._last_amount = amount
        self._amounts.move_to_end(self._kind)
        while len(self._amounts) > _MAX_KINDS:
            self._amounts.popitem(last=False)

    def _demanded(self, total: int, device_memory: int) -> int:
        """Bytes that must leave so that the rest, with writes in flight, fits the budget."""
        room = min(device_memory // 2, self._in_flight_bytes)
        amount = 0 if total <= device_memory else total - (device_memory - room)
        self.reason = (
            f"a step saves {format_bytes(total)} and the device budget is "
            f"{format_bytes(device_memory)}: the first {format_bytes(amount)} leave"
            if amount
            else f"a step saves {format_bytes(total)}, which fits the device budget of "
            f"{format_bytes(device_memory)}: everything stays"
        )
        return amount

    def _explain(self, amount: int, total: int, rates: LinkRates) -> None:
        assert rates.write_bytes_per_second and rates.read_bytes_per_second
        self.reason = (
            f"the first {format_bytes(amount)} of the {format_bytes(total)} that a step saves "
            f"leave; more would not be back in time at "
            f"{format_bandwidth(rates.write_bytes_per_second)} out and "
            f"{format_bandwidth(rates.read_bytes_per_second)} in"
        )


def hidden_prefix(entries: Sequence[SavedEntry], rates: LinkRates, *, window_bytes: int) -> int:
    """How many of the first `entries` can leave and return without delaying the step.

    `entries` are in the order in which they were saved. A prefix is hidden if every write in it
    has ended before its storage is needed (otherwise the bytes never leave, and offloading them
    gains nothing) and the reads delay the step by at most 1 %.
    """
    used = [entry.used_seconds for entry in entries if entry.used_seconds is not None]
    if not used:
        return len(entries)
    tolerance = _TOLERANCE * (max(used) - entries[0].packed_seconds)
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high + 1) // 2
        delay = step_delay(entries[:middle], rates, min(used), window_bytes=window_bytes)
        if delay is not None and delay <= tolerance:
            low = middle
        else:
            high = middle - 1
    return low


def step_delay(
    offloaded: Sequence[SavedEntry],
    rates: LinkRates,
    backward_seconds: float,
    *,
    window_bytes: int,
) -> float | None:
    """Seconds that the step loses if exactly `offloaded` leave; None if a write comes too late.

    Writes go in the order of saving, reads in the order of use, each link one transfer at a time,
    both at once. Reads start with the backward pass and run at most `window_bytes` ahead of it.
    """
    assert rates.write_bytes_per_second and rates.read_bytes_per_second
    write = rates.write_bytes_per_second * _RATE_MARGIN
    read = rates.read_bytes_per_second * _RATE_MARGIN
    written: dict[int, float] = {}
    free = 0.0
    for entry in offloaded:
        free = max(free, entry.packed_seconds) + entry.num_bytes / write
        written[id(entry)] = free
    delay, free = 0.0, backward_seconds
    ahead: deque[tuple[float, int]] = deque()  # (time of use, bytes) of what was read, not used
    ahead_bytes = 0
    needed = [entry for entry in offloaded if entry.used_seconds is not None]
    for entry in sorted(needed, key=lambda entry: entry.used_seconds or 0.0):
        assert entry.used_seconds is not None
        if written[id(entry)] > entry.used_seconds + delay:
            return None
        start = max(free, written[id(entry)])
        while ahead and ahead_bytes + entry.num_bytes > window_bytes:
            use, num_bytes = ahead.popleft()
            ahead_bytes -= num_bytes
            start = max(start, use + delay)
        free = start + entry.num_bytes / read
        delay = max(delay, free - entry.used_seconds)
        ahead.append((entry.used_seconds, entry.num_bytes))
        ahead_bytes += entry.num_bytes
    return delay
