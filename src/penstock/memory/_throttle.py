"""Throttle of a store: to share a disk fairly, or to simulate a slower one."""

from __future__ import annotations

import threading
import time

_BURST_SECONDS = 0.010


class Throttle:
    """Limit on the rate at which bytes pass, first come first served; thread-safe.

    A request of n bytes takes n / rate seconds, as it would on a device of that rate, so that the
    rate measured over busy time is the rate asked for. Idle time is credited up to 10 ms, which
    covers the real transfer between two requests.

    Example:
        >>> throttle = Throttle(1e9)
        >>> throttle.acquire(1_000_000)  # returns within 1 ms

    Args:
        bytes_per_second: The rate, above 0.

    Raises:
        ValueError: The rate is not above 0.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be above 0; got {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._booked_until = time.monotonic()  # all time before this belongs to earlier requests

    def acquire(self, num_bytes: int) -> None:
        """Sleep until a request's bytes may have passed; also more than a second's worth."""
        with self._lock:
            now = time.monotonic()
            begin = max(self._booked_until, now - _BURST_SECONDS)
            self._booked_until = end = begin + num_bytes / self.bytes_per_second
        # Outside the lock: the turn is booked, later requests only need to book theirs behind it.
        if end > now:
            time.sleep(end - now)
