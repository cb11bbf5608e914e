"""For one order: which gaps are evicted, so that the step is as short as the links allow.

Evicting as few bytes as possible fills the device at all times, and then nothing can be fetched
ahead: every transfer into the device waits for the last moment. So the choice is made for less
than the capacity where bytes have to come in, and the replay may use all of it. How much less, and
where, is searched: a profile over the step, coarse to fine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planner.search._engine import HORIZON, OperatorSequence, Replay

SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
_QUICK_SHARES = (1.0, 0.92, 0.8, 0.65, 0.45)
_MAX_SEGMENTS = 32


@dataclass(frozen=True)
class Rates:
    """Bytes per second out of the device and back."""

    out: float
    back: float


@dataclass(frozen=True, eq=False)
class Residency:
    """A choice for one order.

    Attributes:
        sequence: The order.
        evicted: For each gap whether its object leaves.
        replay: What the step then takes, and when things move.
        shares: By position the share of the capacity for which the choice was made.
    """

    sequence: OperatorSequence
    evicted: np.ndarray
    replay: Replay
    shares: np.ndarray

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.replay.step_seconds


class ResidencySearch:
    """Searches profiles for one order.

    Args:
        sequence: The order.
        capacity: Bytes of the arena.
        rates: Of the links; None: there is nowhere to go, so nothing leaves.
        horizon: How many positions ahead values may be fetched.
    """

    def __init__(
        self,
        sequence: OperatorSequence,
        capacity: int,
        rates: Rates | None,
        *,
        horizon: int = HORIZON,
    ) -> None:
        self.horizon = horizon
        self.sequence = sequence
        self.capacity = capacity
        self.rates = rates
        self._needed = sequence.working_set

    def at(self, shares: np.ndarray) -> Residency | None:
        """The choice for a profile; None if it does not fit."""
        sequence, rates = self.sequence, self.rates
        if rates is None:
            evicted = np.zeros(len(sequence.gap_object), np.uint8)
            if sequence.base.max(initial=0) > self.capacity:
                return None
            rates = Rates(1.0, 1.0)
        else:
            target = (self.capacity * shares).astype(np.int64)
            evicted, _ = sequence.choose(np.maximum(target, self._needed))
        replay = sequence.replay(
            evicted,
            self.capacity,
            out_bytes_per_second=rates.out,
            in_bytes_per_second=rates.back,
            horizon=self.horizon,
        )
        if replay.overflow > 0:
            return None
        return Residency(sequence, evicted, replay, shares)

    def quick(self) -> Residency | None:
        """The best of a few uniform profiles."""
        found = [self.at(np.full(len(self.sequence.order), share)) for share in _QUICK_SHARES]
        return min(filter(None, found), key=lambda r: r.seconds, default=None)

    def refine(
        self, best: Residency, *, deadline: float, on_better: Callable[[Residency], object]
    ) -> Residency:
        """Change the profile piece by piece while that helps and time is left.

        Args:
            best: Where to begin.
            deadline: Time by `time.monotonic` at which to stop.
            on_better: Called with each improvement.

        Returns:
            The best found.
        """
        elapsed = np.cumsum(self.sequence.problem.operator_seconds[self.sequence.order])
        if self.rates is None or not best.evicted.any() or not elapsed[-1] > 0:
            return best
        num_segments = 1
        while num_segments <= _MAX_SEGMENTS:
            segment = np.minimum(
                (elapsed / elapsed[-1] * num_segments - 1e-9).astype(np.int64), num_segments - 1
            )
            improved = False
            for index in range(num_segments):
                inside = segment == index
                for share in SHARES:
                    if time.monotonic() > deadline:
                        return best
                    shares = best.shares.copy()
                    shares[inside] = share
                    found = self.at(shares)
                    if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                        best, improved = found, True
                        on_better(best)
            if not improved or num_segments == 1:
                num_segments *= 2
        return best
