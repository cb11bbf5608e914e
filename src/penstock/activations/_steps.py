"""Steps, their profile, and the totals that the report shows.

A step is what is saved up to a backward pass, and that pass; it needs no announcement. All of this
is used under the engine's lock.
"""

from __future__ import annotations

import dataclasses
import time

from penstock.activations._policy import MeasuredRates, Policy, SavedEntry
from penstock.memory import Ledger

_MAX_PROFILE = 100_000  # entries of one step's profile


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over all steps; the report's fields of the same names say what they mean."""

    num_steps: int = 0
    num_saved: int = 0
    num_offloaded: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    bytes_written: int = 0
    forwarded_bytes: int = 0
    bytes_read: int = 0


class LinkClock:
    """Rate of one direction while it is busy: bytes over the union of the transfers' times."""

    def __init__(self) -> None:
        self._active = 0
        self._since_ns = 0
        self._busy_ns = 0
        self._bytes = 0

    def begin(self) -> None:
        """Note that a transfer starts."""
        if self._active == 0:
            self._since_ns = time.perf_counter_ns()
        self._active += 1

    def end(self, num_bytes: int) -> None:
        """Note that a transfer of `num_bytes` (0 if it failed) has ended."""
        self._active -= 1
        self._bytes += num_bytes
        if self._active == 0:
            self._busy_ns += time.perf_counter_ns() - self._since_ns

    def rate(self) -> float | None:
        """Return bytes per second since the last call; None if nothing was moved."""
        rate = self._bytes * 1e9 / self._busy_ns if self._busy_ns else None
        self._bytes = self._busy_ns = 0
        return rate or None


class StepTracker:
    """Steps as they come: where they begin and end, their profile, and the sums over all."""

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        self.totals = Totals()
        self.leaving_bytes = 0  # of this step: what the policy sends out
        self.writes = LinkClock()
        self.reads = LinkClock()
        self._ledger = ledger
        self.policy = policy
        self._started_bytes = 0
        self._stall_ns = self._stall_ns_before = 0
        self._profile: list[SavedEntry] = []
        self._in_step = False
        self._backward_seen = False
        self._first_pack_ns = self._last_pack_ns = 0
        self._first_use_ns = self._last_use_ns = 0

    def begin_if_due(self, *, in_backward: bool, num_live: int) -> bool:
        """Start a step, before a storage is registered, if the last one is over.

        A step is over when a backward pass has used it, or when all of it was abandoned.
        """
        if in_backward and self._in_step:
            return False
        if self._in_step and not self._backward_seen and num_live:
            return False
        self.end()
        self._in_step = True
        self.leaving_bytes = self._started_bytes = 0
        self._stall_ns_before = self._stall_ns
        self.totals.num_steps += 1
        self.policy.begin_step()
        self._first_pack_ns = self._last_pack_ns = time.perf_counter_ns()
        self._first_use_ns = self._last_use_ns = 0
        return True

    def end(self) -> None:
        """Close the step under way, if there is one: its profile goes to the policy."""
        if not self._in_step:
            return
        middle = self._first_use_ns or self._last_pack_ns
        self._ledger.record_span("compute", "forward", self._first_pack_ns, middle)
        if self._backward_seen:
            end = max(middle, self._last_use_ns)
            self._ledger.record_span("compute", "backward", middle, end)
            rates = MeasuredRates(
                write_bytes_per_second=self.writes.rate(), read_bytes_per_second=self.reads.rate()
            )
            stall_seconds = (self._stall_ns - self._stall_ns_before) / 1e9
            self.policy.learn(self._profile, rates, stall_seconds)
        self._ledger.begin_step()
        self._profile = []
        self._in_step = self._backward_seen = False

    def note_saved(self, num_bytes: int, *, offloadable: bool) -> SavedEntry:
        """Note that a storage was saved, and return its entry in the profile."""
        self._last_pack_ns = time.perf_counter_ns()
        entry = SavedEntry(num_bytes, self._clock(self._last_pack_ns), offloadable)
        if len(self._profile) < _MAX_PROFILE:
            self._profile.append(entry)
        return entry

    def note_started(self, num_bytes: int, num_storages: int) -> None:
        """Note that the first write of one storage, or of a chunk of several, starts."""
        self._started_bytes += num_bytes
        self.totals.offloaded_bytes += num_bytes
        self.totals.num_offloaded += num_storages

    def note_refused(self, num_bytes: int, num_storages: int, *, forwarded: bool) -> None:
        """Take `note_started` back, as no byte has moved."""
        self.totals.offloaded_bytes -= num_bytes
        self.totals.num_offloaded -= num_storages
        self.totals.forwarded_bytes -= num_bytes if forwarded else 0

    def have_most_writes_started(self) -> bool:
        """Return whether the writes of nine tenths of what leaves in this step have started."""
        return self._started_bytes >= 0.9 * self.leaving_bytes

    def note_used(self, entry: SavedEntry, *, in_backward: bool) -> None:
        """Note a use by a backward pass; a look at `grad_fn._saved_x` does not count."""
        if not in_backward:
            return
        self._last_use_ns = time.perf_counter_ns()
        if not self._backward_seen:
            self._backward_seen = True
            self._first_use_ns = self._last_use_ns
        if entry.used_seconds is None:
            entry.used_seconds = self._clock(self._last_use_ns)

    def note_released(self) -> None:
        """Note that a storage's last handle died: in a backward pass perhaps the step's end."""
        if self._backward_seen:
            self._last_use_ns = time.perf_counter_ns()

    def note_stall(self, reason: str, start_ns: int) -> None:
        """Note that the computation stood still from `start_ns` until now."""
        end_ns = time.perf_counter_ns()
        self._stall_ns += end_ns - start_ns
        self._ledger.record_stall(reason, start_ns, end_ns)

    def _clock(self, now_ns: int) -> float:
        return (now_ns - self._stall_ns) / 1e9
