"""Choice of the saved storages that leave: all that may, or as many as the links can hide.

The amount is a prefix of what a step saves, in bytes: what is saved first is needed last, so the
beginning of the forward pass has the longest time to leave and to return, and the tail stays
(SSDTrain, arXiv 2408.10013, section III; there the condition is an inequality over one bandwidth,
here the two links are simulated with their own rates against the times of the last step).

Evidence beats simulation: what left in a step that did not wait can leave in the next one; after
a step that waited the amount shrinks, and grows again little by little.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from penstock.units import format_bandwidth, format_bytes

CHUNK_BYTES = 64 * 1024
_TOLERANCE = 0.02  # of the step's duration: what may be lost to waiting
_RATE_MARGIN = 0.9  # rates fluctuate; plan with less than was measured
_GROWTH = 0.02  # of a step's bytes: how fast the amount grows back after a step that waited
_NUM_RATES = 3  # steps over which the best rate counts: one disturbed step changes no plan
_PATIENCE = 2  # steps that wait, one after the other, before the plan is wrong and not the machine
_MAX_KINDS = 16  # kinds of step remembered (models trained in turn, batch shapes)


@dataclasses.dataclass(slots=True)
class SavedEntry:
    """One storage in the profile of a step; times in seconds on a clock that stops at stalls."""

    num_bytes: int
    packed_seconds: float
    offloadable: bool
    used_seconds: float | None = None  # first needed by the backward pass
    left: bool = False  # its bytes were out of memory before they were needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one `Offload`, in bytes."""

    device_memory: int | None
    """Budget for saved storages on the device tier."""
    min_bytes: int
    """Length of a storage; a shorter one leaves only where the budget demands it."""
    ahead_bytes: int
    """Distance that reads run ahead of the backward pass; and the backlog of writes beyond which
    saving waits, where there is no budget."""

    @property
    def has_budget(self) -> bool:
        """True if the device tier is limited."""
        return self.device_memory is not None

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk of small storages."""
        budget = self.device_memory
        return CHUNK_BYTES if budget is None else min(CHUNK_BYTES, budget // 4)

    @property
    def small_bytes(self) -> int:
        """Length of a storage; a shorter one is saved in a chunk."""
        return min(self.min_bytes, self.chunk_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """Measured rates of the two directions, bytes per second; None before the first transfer."""

    write_bytes_per_second: float | None
    read_bytes_per_second: float | None


class Policy:
    """Policy "all": everything eligible leaves, and saving waits where the store is slower."""

    name = "all"
    limits_backlog = True  # whether saving waits while too many writes do
    has_amount = False  # whether a budget has shown how much of this step has to leave
    waits_for_writes = True  # whether a backward pass that follows at once waits for their start

    def __init__(self) -> None:
        self.reason = "every eligible storage leaves, as policy='all' asks"
        self.kept_bytes = 0  # of a step: what is meant to stay, whose room reads may take later

    def begin_step(self) -> None:
        """Note that a new step starts."""

    def should_offload(self, num_bytes: int, in_backward: bool) -> bool:
        """Return whether the storage being saved should leave."""
        return True

    def learn(
        self, entries: Sequence[SavedEntry], rates: MeasuredRates, stall_seconds: float = 0.0
    ) -> None:
        """Learn from the profile of the step that ended, which waited for `stall_seconds`."""


class AutoPolicy(Policy):
    """Policy "auto": the longest prefix that returns in time leaves, or what the budget demands.

    The first step offloads everything and is profiled; every later one is planned from the last
    step of its kind (recognised by its first offloadable storage).
    """

    name = "auto"
    waits_for_writes = False

    def __init__(self, limits: Limits) -> None:
        self.reason = "no step has ended yet; the first one offloads everything and is measured"
        self.limits_backlog = True
        self.kept_bytes = 0
        self._limits = limits
        self._rates: deque[MeasuredRates] = deque(maxlen=_NUM_RATES)
        self._quotas: OrderedDict[int, _Quota] = OrderedDict()  # by kind of step
        self._last_quota: _Quota | None = None
        self._amount: int | None = None  # bytes to offload in this step; None: everything
        self._kind: int | None = None
        self._offloaded = 0

    @property
    def has_amount(self) -> bool:  # type: ignore[override]
        """True if a step of this kind has shown what a device budget demands."""
        return self._limits.has_budget and self._amount is not None

    def begin_step(self) -> None:
        """Forget the position in the step that ended."""
        self._kind = None
        self._offloaded = 0

    def should_offload(self, num_bytes: int, in_backward: bool) -> bool:
        """Return whether the storage belongs to the prefix of this step that leaves.

        What is saved during a backward pass (a recomputed region, double backward) is needed next
        and stays.
        """
        if in_backward:
            return False
        if self._kind is None:
            self._kind = num_bytes
            quota = self._quotas.get(num_bytes, self._last_quota)
            self._amount = None if quota is None else quota.amount
            self.kept_bytes = 0 if quota is None else quota.kept_bytes
            self.limits_backlog = quota is None
        if self._amount is not None and self._offloaded + num_bytes > self._amount:
            self._offloaded = max(self._offloaded, self._amount)  # a prefix: nothing after it
            return False
        self._offloaded += num_bytes
        return True

    def learn(
        self, entries: Sequence[SavedEntry], rates: MeasuredRates, stall_seconds: float = 0.0
    ) -> None:
        """Set the quota of the next step of this kind from the profile of the one that ended."""
        total = sum(entry.num_bytes for entry in entries)
        budget = self._limits.device_memory
        if self._kind is None:  # it was never asked: all was too small to move by itself
            if budget is not None:
                self._meet_budget(total, budget)
            else:
                self.reason = "everything that a step saves is smaller than min_bytes and stays"
            return
        if budget is not None:
            quota = self._meet_budget(total, budget)
        else:
            # A step whose storages were all forwarded before they left measures nothing: the
            # rates of those before it still hold.
            if rates.write_bytes_per_second is not None:
                self._rates.append(rates)
            if not self._rates:
                self.reason = (
                    "no write has ended before its storage was needed again, so the next step "
                    "offloads everything as well and is measured"
                )
                return
            quota = self._hide(entries, total, stall_seconds)
            self._explain(quota.amount, total)
        self._quotas[self._kind] = self._last_quota = quota
        self._quotas.move_to_end(self._kind)
        while len(self._quotas) > _MAX_KINDS:
            self._quotas.popitem(last=False)

    def _hide(self, entries: Sequence[SavedEntry], total: int, stall_seconds: float) -> _Quota:
        """Return the quota that leaves and returns without delaying the step."""
        assert self._kind is not None
        rates = self._best_rates()
        last = self._quotas.get(self._kind) or _Quota(amount=total, kept_bytes=0)
        count = count_hidden(entries, rates, window_bytes=self._limits.ahead_bytes)
        amount = sum(entry.num_bytes for entry in entries[:count] if entry.offloadable)
        if stall_seconds <= _TOLERANCE * _duration(entries):
            num_waited, ceiling = 0, last.ceiling + _GROWTH * total
            amount = int(min(max(amount, _left_bytes(entries)), ceiling))
        else:
            num_waited = last.num_waited + 1
            if num_waited == _PATIENCE:
                assert rates.read_bytes_per_second
                num_waited = 0
                waited_for = int(stall_seconds * rates.read_bytes_per_second)
                amount = max(0, min(amount, self._offloaded - waited_for))
            ceiling = amount
        return _Quota(amount, total - amount, num_waited, ceiling)

    def _best_rates(self) -> MeasuredRates:
        """Return the best rates of the last steps, in each direction."""
        writes = [rates.write_bytes_per_second or 0.0 for rates in self._rates]
        reads = [rates.read_bytes_per_second or 0.0 for rates in self._rates]
        # Where everything was forwarded, nothing was ever read.
        return MeasuredRates(
            write_bytes_per_second=max(writes), read_bytes_per_second=max(reads) or max(writes)
        )

    def _meet_budget(self, total: int, device_memory: int) -> _Quota:
        """Return the quota with which the rest, and writes in flight, fit the budget."""
        room = min(device_memory // 2, self._limits.ahead_bytes)
        amount = 0 if total <= device_memory else total - (device_memory - room)
        self.reason = (
            f"a step saves {format_bytes(total)} and the device budget is "
            f"{format_bytes(device_memory)}: the first {format_bytes(amount)} leave"
            if amount
            else f"a step saves {format_bytes(total)}, which fits the device budget of "
            f"{format_bytes(device_memory)}: everything stays"
        )
        return _Quota(amount, total - amount)

    def _explain(self, amount: int, total: int) -> None:
        rates = self._best_rates()
        assert rates.write_bytes_per_second and rates.read_bytes_per_second
        self.reason = (
            f"the first {format_bytes(amount)} of the {format_bytes(total)} that a step saves "
            f"leave, which the links hide at {format_bandwidth(rates.write_bytes_per_second)} out "
            f"and {format_bandwidth(rates.read_bytes_per_second)} in"
        )


@dataclasses.dataclass(frozen=True)
class _Quota:
    """Bytes that a kind of step offloads and keeps."""

    amount: int
    kept_bytes: int
    num_waited: int = 0  # steps in a row that waited for transfers
    ceiling: float = math.inf  # bytes: the amount may not exceed this for now


def _duration(entries: Sequence[SavedEntry]) -> float:
    """Return the seconds from the first save to the last use."""
    used = [entry.used_seconds for entry in entries if entry.used_seconds is not None]
    return max(used) - entries[0].packed_seconds if used else 0.0


def _left_bytes(entries: Sequence[SavedEntry]) -> int:
    """Return the length of the longest prefix that was out of memory when it was needed.

    What may not leave is passed over.
    """
    num_bytes = 0
    for entry in entries:
        if entry.offloadable and not entry.left:
            break
        num_bytes += entry.num_bytes if entry.offloadable else 0
    return num_bytes


def count_hidden(entries: Sequence[SavedEntry], rates: MeasuredRates, *, window_bytes: int) -> int:
    """Return how many of the first entries can leave and return without delaying the step.

    A prefix is hidden if every write in it has ended before its storage is needed (otherwise the
    bytes never leave, and offloading them gains nothing) and the reads delay the step by at most
    2 %.

    Args:
        entries: In the order of saving; what is not offloadable stays wherever it stands.
        rates: Of both directions.
        window_bytes: How far reads run ahead of the backward pass.
    """
    if not any(entry.used_seconds is not None for entry in entries):
        return len(entries)
    tolerance = _TOLERANCE * _duration(entries)
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high + 1) // 2
        delay = simulate_delay(entries, middle, rates, window_bytes=window_bytes)
        if delay is not None and delay <= tolerance:
            low = middle
        else:
            high = middle - 1
    return low


def _write_ends(entries: Sequence[SavedEntry], bytes_per_second: float) -> dict[int, float]:
    # Storage i of b_i bytes is saved at p_i and used at u_i, on the clock of the undisturbed step.
    # Its write ends at w_i = max(w_(i-1), p_i) + b_i / W.
    written, free = {}, 0.0
    for entry in entries:
        free = max(free, entry.packed_seconds) + entry.num_bytes / bytes_per_second
        written[id(entry)] = free
    return written


def simulate_delay(
    entries: Sequence[SavedEntry], count: int, rates: MeasuredRates, *, window_bytes: int
) -> float | None:
    """Return the seconds that the step loses if the first `count` leave; None: a write is too late.

    Writes go in the order of saving, reads in the order of use, each link one transfer at a time,
    both at once. Reads start with the backward pass and run as far ahead of it as `window_bytes`
    and the room that kept storages have left allow.
    """
    assert rates.write_bytes_per_second and rates.read_bytes_per_second
    write = rates.write_bytes_per_second * _RATE_MARGIN
    read = rates.read_bytes_per_second * _RATE_MARGIN
    offloaded = [entry for entry in entries[:count] if entry.offloadable]
    written = _write_ends(offloaded, write)
    used = {id(entry): entry.used_seconds for entry in entries if entry.used_seconds is not None}
    # (time of use, bytes) of what is in memory: kept, or read ahead
    resident = [
        (used[id(entry)], entry.num_bytes)
        for entry in entries
        if id(entry) in used and id(entry) not in written
    ]
    heapq.heapify(resident)
    resident_bytes = sum(num_bytes for _, num_bytes in resident)
    limit = resident_bytes + window_bytes
    # In the order of use its read ends at r_j = max(r_(j-1), w_j, v_j) + b_j / R, where v_j is when
    # there is room for it, and the delay is D_j = max(D_(j-1), r_j - u_j); all later uses are D_j
    # later, and w_j <= u_j + D_(j-1) must hold.
    delay, free = 0.0, min(used.values(), default=0.0)
    needed = [entry for entry in offloaded if id(entry) in used]
    for entry in sorted(needed, key=lambda entry: used[id(entry)]):
        if written[id(entry)] > used[id(entry)] + delay:
            return None
        start = max(free, written[id(entry)])
        while resident and resident_bytes + entry.num_bytes > limit:
            use, num_bytes = heapq.heappop(resident)
            resident_bytes -= num_bytes
            start = max(start, use + delay)
        free = start + entry.num_bytes / read
        delay = max(delay, free - used[id(entry)])
        heapq.heappush(resident, (used[id(entry)], entry.num_bytes))
        resident_bytes += entry.num_bytes
    return delay
