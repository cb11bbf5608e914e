"""Offsets for the finalists of a search, and the fastest of them once they have some."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.errors import InfeasibleError
from penstock.planner.search._auto import SearchCandidate
from penstock.planner.search._offsets import (
    Addressed,
    assign_offsets,
    better_failure,
    pack_offsets,
    sufficient_bytes,
)
from penstock.planner.search._priority_search import improve_offsets
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch

# Steps so short are packed as well: where the packer fits tightly, fewer transfers may wait.
_FEW_POSITIONS = 500
# Shares of the arena for which evictions are chosen, when they get offsets.
_ARENA_SHARES = (0.99, 0.97, 0.95, 0.92, 0.85, 0.7, 0.4, 0.0)
_FINALIST_SHARE = 0.3  # of the time that is left, for the fastest of the finalists left
_FIRST_SHARE = 0.35  # of the time, for the first offsets of each; the rest improves the best
_AS_GOOD = 1.001  # offsets that make no finalist slower are not improved
_ENGINE_SHARE = 0.6  # of a finalist's time, as long as it has no offsets
_NUM_LATE_TRIES = 3  # choices for which the engine is asked even if there is no time
_WORTH_IT = 0.998  # of the best time: smaller gains are not searched for


def offsets_of_fastest(
    finalists: Sequence[SearchCandidate],
    arena: Arena,
    *,
    deadline: float,
    seed: int,
    tighter: Sequence[SearchCandidate] = (),
) -> Addressed:
    """Return the finalist that is the fastest once it has offsets.

    Args:
        finalists: Candidates, the fastest first; each has its share of the time.
        arena: The arena.
        deadline: Time by `time.monotonic`.
        seed: Of random numbers.
        tighter: Candidates that were found for smaller arenas.

    Raises:
        InfeasibleError: None of them has offsets.
    """
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    began, last = time.monotonic(), deadline
    for index, candidate in enumerate(finalists):
        now = time.monotonic()
        # Without second runs a choice for a smaller arena is worth more than other priorities.
        deadline = last
        if best is not None and candidate.dropped:
            deadline = began + max(0.0, last - began) * _FIRST_SHARE
        if best is not None and (candidate.seconds >= best[0].seconds or now > deadline):
            continue
        share = max(_FINALIST_SHARE, 1 / (len(finalists) - index))
        try:
            best = find_offsets(
                candidate.choice,
                arena,
                best=best,
                deadline=now + max(0.0, deadline - now) * share,
                seed=seed,
            )
        except InfeasibleError as error:
            failure = better_failure(failure, error)
    if best is None:
        assert failure is not None
        raise failure
    if arena.lower is None or best[0].seconds <= finalists[0].seconds * _AS_GOOD:
        return best
    near = [c.choice for c in (*tighter, *finalists[:1]) if c.seconds < best[0].seconds]
    return improve_offsets(best, near, arena, deadline=last, seed=seed)


def find_offsets(
    choice: EvictionChoice,
    arena: Arena,
    *,
    best: Addressed | None = None,
    deadline: float,
    seed: int,
) -> Addressed:
    """Find offsets for a choice, or for one for a smaller arena where these cost less time.

    `best` has offsets already, and is returned where this is not faster.
    """
    # Where the engine's strategies find nothing, the packer needs its part of the time.
    now = time.monotonic()
    halfway = now + max(0.0, deadline - now) * _ENGINE_SHARE
    for number, smaller in enumerate(_for_smaller_arenas(choice, arena)):
        until = halfway if best is None else deadline
        # A late choice has a cheap try nevertheless: one for a much smaller arena costs more.
        if time.monotonic() > until and (best is not None or number >= _NUM_LATE_TRIES):
            break
        worth = best[0].seconds * _WORTH_IT if best is not None else np.inf
        best = assign_offsets(smaller, arena, worth=worth, deadline=until) or best
    pack_seconds = min(max(0.5, (deadline - time.monotonic()) / 16), 2.0)
    limits = {"pack_seconds": pack_seconds, "deadline": deadline}
    if best is None:
        return _pack_smaller(choice, arena, seed=seed, **limits)
    if len(choice.sequence.order) <= _FEW_POSITIONS:
        with contextlib.suppress(InfeasibleError):
            other = pack_offsets(choice, arena, seed=seed, **limits)
            return min(best, other, key=lambda found: found[0].seconds)
    return best


def _pack_smaller(
    choice: EvictionChoice,
    arena: Arena,
    *,
    pack_seconds: float,
    deadline: float,
    seed: int,
) -> Addressed:
    """Pack choices for smaller and smaller arenas until one fits."""
    failure: InfeasibleError | None = None
    choices = list(_for_smaller_arenas(choice, arena))
    while choices:
        # Late, the choice for the smallest arena first: it is the most likely to fit.
        is_late = time.monotonic() > deadline
        try:
            return pack_offsets(
                choices.pop(-1 if is_late else 0),
                arena,
                pack_seconds=pack_seconds,
                deadline=deadline,
                seed=seed,
            )
        except InfeasibleError as error:
            failure = better_failure(failure, error)
    assert failure is not None
    given, enough = (
        num_bytes + arena.workspace_bytes
        for num_bytes in (arena.capacity, sufficient_bytes(failure))
    )
    raise InfeasibleError(
        f"device_memory={given} bytes: what the operators need fits, "
        f"but no addresses were found that do; {enough} bytes suffice for a plan that was found: "
        "raise device_memory= or time_limit=",
        sufficient_device_bytes=enough,
    )


def _for_smaller_arenas(choice: EvictionChoice, arena: Arena) -> Iterator[EvictionChoice]:
    """Yield the choice itself, then choices for smaller and smaller arenas."""
    yield choice
    if arena.lower is None:
        return
    sequence = choice.sequence
    least = int(sequence.working_set.max(initial=0))
    seen = {choice.replay.in_start.tobytes()}
    # First with its own profile; then with nothing kept that an operator does not use.
    for shares in (choice.shares, np.zeros_like(choice.shares)):
        for share in _ARENA_SHARES:
            smaller = dataclasses.replace(arena, capacity=max(least, int(arena.capacity * share)))
            found = ResidencySearch(sequence, smaller).at(shares)
            if found is not None and (key := found.replay.in_start.tobytes()) not in seen:
                seen.add(key)
                yield found
    smallest = dataclasses.replace(arena, capacity=least)
    found = ResidencySearch(sequence, smallest, prefetch_distance=0).at(choice.shares * 0)
    if found is not None:
        yield found
