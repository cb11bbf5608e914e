"""Evictions for one order, so that the step is as short as the links allow.

Evicting as few bytes as possible fills the device at all times, and then no value can be fetched
ahead: every transfer into the device waits for the last moment. So evictions are chosen for less
than the capacity where bytes have to come in, and the replay may use all of it. How much less, and
where, is searched: a profile of shares over the step, coarse to fine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.planner._request import LinkRates
from penstock.planner.search._sequence import MAX_PREFETCH_DISTANCE, OperatorSequence, ReplayTimes

SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
_QUICK_SHARES = (1.0, 0.92, 0.8, 0.65, 0.45)
_MAX_SEGMENTS = 32
_NUM_TIER_TRIES = 5
_FEW_HOLES = 64  # have the same evictions for many profiles


@dataclass(frozen=True)
class LowerTiers:
    """Tiers below the device, as the search sees them."""

    # Of the links to the first tier, and of those to the second one, if there is one.
    rates: tuple[LinkRates, ...]
    first_bytes: int | None = None  # bytes of the first tier; None: as many as needed
    # For each tier the seconds by which moving a byte slows the operators down.
    interference: tuple[float, ...] = (0.0, 0.0)


@dataclass(frozen=True)
class Arena:
    """Memory of a search."""

    capacity: int  # bytes of the arena
    lower: LowerTiers | None  # the lower tiers; None: there are none, so nothing leaves
    workspace_bytes: int = 0  # of the device, beside the arena


@dataclass(frozen=True, eq=False)
class EvictionChoice:
    """Evictions for one order, with the times that follow."""

    sequence: OperatorSequence
    evicted: np.ndarray  # for each hole whether its storage leaves
    replay: ReplayTimes  # times of the step and of the transfers
    shares: np.ndarray  # by position the share of the capacity for which the choice was made
    # For each hole the tier that its storage leaves to; None: all to the first.
    tier: np.ndarray | None = None
    interference_seconds: float = 0.0  # time by which its transfers slow the operators down

    @property
    def seconds(self) -> float:
        """Time of a step, interference included."""
        return self.replay.step_seconds + self.interference_seconds

    def windows(self, slack: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return for each hole when its storage has left, and when it begins to come back.

        Both are boundaries; those of the next step count on.

        Args:
            slack: Part of the boundaries of each transfer that it has; 0: transfers take no time.
        """
        sequence, replay, num_positions = self.sequence, self.replay, len(self.shares)
        after, use = sequence.hole_start + np.int64(1), sequence.hole_end.astype(np.int64)
        left = np.where(sequence.dirty(self.evicted), replay.out_end, after)
        left = after + ((np.clip(left, after, use) - after) * slack).astype(np.int64)
        # The engine counts from the step of the next use.
        ahead = np.minimum(use % num_positions - replay.in_start, num_positions)
        return left, np.clip(use - (ahead * slack).astype(np.int64), left, use)

    def parts(self, slack: float = 1.0) -> np.ndarray:
        """Return the `PART`s between evicted holes; `slack` as of `windows`."""
        return self.sequence.cut(self.evicted, *self.windows(slack))


class ResidencySearch:
    """A search for evictions of one order."""

    def __init__(self, sequence: OperatorSequence, arena: Arena) -> None:
        self.sequence, self.capacity, self.lower = sequence, arena.capacity, arena.lower
        self._is_short = len(sequence.hole_object) <= _FEW_HOLES
        self._replays: dict[tuple[bytes, bytes, int], ReplayTimes] = {}

    def at(
        self, shares: np.ndarray, *, prefetch_distance: int = MAX_PREFETCH_DISTANCE
    ) -> EvictionChoice | None:
        """Choose evictions for a profile of shares; return None if they do not fit."""
        sequence = self.sequence
        if self.lower is None:
            if sequence.base.max(initial=0) > self.capacity:
                return None
            evicted, tier = np.zeros(len(sequence.hole_object), np.uint8), None
        else:
            chosen = self._evict(self._target(shares), self.lower)
            if chosen is None:
                return None
            evicted, tier = chosen
        replay = self._replay(evicted, tier, prefetch_distance)
        if replay.overflow > 0:
            return None
        return EvictionChoice(
            sequence, evicted, replay, shares, tier, self._interference(evicted, tier)
        )

    def _replay(
        self, evicted: np.ndarray, tier: np.ndarray | None, prefetch_distance: int
    ) -> ReplayTimes:
        """Time evictions, those of few holes once: they are the same for many profiles."""
        key = b"", b"", prefetch_distance
        if self._is_short:
            key = evicted.tobytes(), b"" if tier is None else tier.tobytes(), prefetch_distance
            if key in self._replays:
                return self._replays[key]
        replay = self.sequence.replay(
            evicted,
            self.capacity,
            self.lower.rates if self.lower else (LinkRates(1.0, 1.0),),
            tier=tier,
            prefetch_distance=prefetch_distance,
        )
        if self._is_short:
            self._replays[key] = replay
        return replay

    def _target(self, shares: np.ndarray) -> np.ndarray:
        """Return for each position the bytes for which evictions are chosen."""
        return np.maximum((self.capacity * shares).astype(np.int64), self.sequence.working_set)

    def _interference(self, evicted: np.ndarray, tier: np.ndarray | None) -> float:
        if self.lower is None or not any(self.lower.interference):
            return 0.0
        sequence = self.sequence
        moves = (sequence.hole_start >= 0).astype(np.int64) + sequence.dirty(evicted)
        moved = np.where(evicted != 0, moves * sequence.hole_bytes, 0)
        interference = np.asarray(self.lower.interference)
        return float(moved @ interference[np.zeros(len(moved), np.int64) if tier is None else tier])

    def _evict(
        self, target: np.ndarray, lower: LowerTiers
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return evictions and their tiers; None if the lower tiers are too small."""
        evicted = self.sequence.evict(target)
        if lower.first_bytes is None:
            return evicted, None
        tier = self.sequence.tiers(evicted, lower.first_bytes)
        if len(lower.rates) > 1:
            return evicted, tier
        bias = np.zeros(len(evicted))
        for _ in range(_NUM_TIER_TRIES):
            outside = (tier != 0) & (evicted != 0)
            if not outside.any():
                return evicted, None
            bias[outside] = -1e12  # after all others
            evicted = self.sequence.evict(target, bias=bias)
            tier = self.sequence.tiers(evicted, lower.first_bytes)
        return None

    def quick(self) -> EvictionChoice | None:
        """Return the best of a few uniform profiles."""
        found = [self.at(np.full(len(self.sequence.order), share)) for share in _QUICK_SHARES]
        return min(filter(None, found), key=lambda r: r.seconds, default=None)

    def refine(
        self,
        best: EvictionChoice,
        *,
        deadline: float,
        on_better: Callable[[EvictionChoice], object],
    ) -> None:
        """Change the profile of a choice piece by piece while that helps and time is left."""
        elapsed = np.cumsum(self.sequence.problem.operator_seconds[self.sequence.order])
        if self.lower is None or not best.evicted.any() or not elapsed[-1] > 0:
            return
        num_segments, tried = 1, {self._key(best.shares)}
        settled: set[bytes] = set()  # segments of which all shares were tried in the best profile
        while num_segments <= _MAX_SEGMENTS:
            improved = False
            for inside in _segments(elapsed / elapsed[-1], num_segments):
                name, before = inside.tobytes(), best
                if name in settled:
                    continue
                for share in SHARES:
                    if time.monotonic() > deadline:
                        return
                    shares = best.shares.copy()
                    shares[inside] = share
                    if (key := self._key(shares)) in tried:
                        continue
                    tried.add(key)
                    found = self.at(shares)
                    if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                        best, improved = found, True
                        on_better(best)
                if best is before:
                    settled.add(name)
                else:
                    settled.clear()
            if not improved or num_segments == 1:
                num_segments *= 2

    def _key(self, shares: np.ndarray) -> bytes:
        """Return a key of the evictions of a profile: equal where these are chosen for the same."""
        return hashlib.blake2b(self._target(shares).tobytes(), digest_size=16).digest()


def _segments(elapsed: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield segments of a step that has positions, as booleans by position.

    `elapsed` are the parts of its time that have gone by at the end of each.
    """
    segment = np.minimum((elapsed * count - 1e-9).astype(np.int64), count - 1)
    for index in np.unique(segment):
        yield segment == index
