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

from penstock.planner.search._engine import HORIZON, OperatorSequence, Rates, Replay

SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
_QUICK_SHARES = (1.0, 0.92, 0.8, 0.65, 0.45)
_MAX_SEGMENTS = 32
_NUM_TRIES_BELOW = 5


@dataclass(frozen=True)
class Below:
    """Where bytes can go.

    Attributes:
        rates: Of the links to the first tier, and of those to the second one, if there is one.
        first_bytes: Bytes of the first tier; None: as many as needed.
        tolls: For each tier the seconds of computing that a byte on its way costs.
    """

    rates: tuple[Rates, ...]
    first_bytes: int | None = None
    tolls: tuple[float, ...] = (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Residency:
    """A choice for one order.

    Attributes:
        sequence: The order.
        evicted: For each gap whether its object leaves.
        replay: What the step then takes, and when things move.
        shares: By position the share of the capacity for which the choice was made.
        tier: For each gap to which tier its object goes; None: all to the first.
        toll: Seconds that its transfers cost computing, beyond what waits for them.
    """

    sequence: OperatorSequence
    evicted: np.ndarray
    replay: Replay
    shares: np.ndarray
    tier: np.ndarray | None = None
    toll: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of a step, with the toll."""
        return self.replay.step_seconds + self.toll


class ResidencySearch:
    """Searches profiles for one order.

    Args:
        sequence: The order.
        capacity: Bytes of the arena.
        below: Where bytes can go; None: nowhere, so nothing leaves.
        horizon: How many positions ahead values may be fetched.
    """

    def __init__(
        self,
        sequence: OperatorSequence,
        capacity: int,
        below: Below | None,
        *,
        horizon: int = HORIZON,
    ) -> None:
        self.horizon = horizon
        self.sequence = sequence
        self.capacity = capacity
        self.below = below
        self._needed = sequence.working_set

    def at(self, shares: np.ndarray) -> Residency | None:
        """The choice for a profile; None if it does not fit."""
        sequence = self.sequence
        if self.below is None:
            if sequence.base.max(initial=0) > self.capacity:
                return None
            evicted, tier = np.zeros(len(sequence.gap_object), np.uint8), None
        else:
            target = np.maximum((self.capacity * shares).astype(np.int64), self._needed)
            chosen = self._chosen(target, self.below)
            if chosen is None:
                return None
            evicted, tier = chosen
        replay = sequence.replay(
            evicted,
            self.capacity,
            self.below.rates if self.below else (Rates(1.0, 1.0),),
            tier=tier,
            horizon=self.horizon,
        )
        if replay.overflow > 0:
            return None
        return Residency(sequence, evicted, replay, shares, tier, self._toll(evicted, tier))

    def _toll(self, evicted: np.ndarray, tier: np.ndarray | None) -> float:
        if self.below is None or not any(self.below.tolls):
            return 0.0
        sequence = self.sequence
        moves = (sequence.gap_start >= 0).astype(np.int64) + sequence.dirty(evicted)
        moved = np.where(evicted != 0, moves * sequence.gap_bytes, 0)
        tolls = np.asarray(self.below.tolls)
        return float(moved @ tolls[np.zeros(len(moved), np.int64) if tier is None else tier])

    def _chosen(
        self, target: np.ndarray, below: Below
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """What leaves, and to which tier; None if there is too little room below."""
        evicted, _ = self.sequence.choose(target)
        if below.first_bytes is None:
            return evicted, None
        tier = self.sequence.tiers(evicted, below.first_bytes)
        if len(below.rates) > 1:
            return evicted, tier
        stays = np.zeros(len(evicted))
        for _ in range(_NUM_TRIES_BELOW):
            outside = (tier != 0) & (evicted != 0)
            if not outside.any():
                return evicted, None
            stays[outside] = -1e12  # behind everything else
            evicted, _ = self.sequence.choose(target, bias=stays)
            tier = self.sequence.tiers(evicted, below.first_bytes)
        return None

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
        if self.below is None or not best.evicted.any() or not elapsed[-1] > 0:
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
