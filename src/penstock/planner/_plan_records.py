"""Records that a plan consists of: placements, transfers, copies, budgets and bounds.

**Positions.** `Plan.order` lists operators, one at a position, N positions in all; an operator that
appears again is recomputed. Everything else is said in positions, never in seconds, so that a plan
is right however long operators and transfers really take. Position p begins at *boundary* p, in
this sequence:

1. The operator at position p - 1 has finished. Copies that end at p are gone. Transfers out of the
   device that start at p may begin.
2. Transfers out of the device (and between host and file) that end at p have finished.
3. Transfers into the device (and between host and file) that start at p may begin.
4. Transfers into the device that end at p have finished. The operator at position p runs.

So bytes that come in at boundary p may take the place of bytes that left by boundary p, and the
operator at p may read them: `start` and `end` of a transfer out of the device or into it may be the
same boundary. Results of the operator at p can leave from boundary p + 1 on, and so can values that
came in by boundary p. Transfers on one link run one after the other, in the plan's order; none has
to be finished before one ahead of it may begin.

**Steps repeat.** Boundary N is boundary 0 of the next step: an interval may end beyond N, by at
most N, and then goes on at the beginning of the step, where the value `final` of a persistent
storage is called `initial`. Only such values go beyond N. A value that begins a step where it was
at the end of the one before (a parameter that never moves) either has one interval beyond N, or two
that meet at the boundary: one ends at N, the other starts at 0, at the same address. Inputs (the
value `initial` of storages that are not persistent) are placed from boundary 0 without a transfer
and can leave from boundary 1 on; results (the value `final` of such storages) are placed up to
boundary N.

**Every run has its places.** An operator that runs again makes all it made the first time (or, with
`recompute_args`, its `creates`), so each of these has a placement that starts there. Values of no
bytes need neither placements nor copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.memory import Link, Tier


class Placement(NamedTuple):
    """A value on the device.

    Attributes:
        value: Index of the value.
        offset: Its first byte in the arena.
        num_bytes: Bytes that it takes.
        start: First boundary: the position of the operator that makes it, or the start of the
            transfer that brings it in.
        end: Last boundary, exclusive. A value that an operator at position p turns into another in
            the same place (`Operator.mutates`, `Operator.may_overwrite`) ends at p, where the other
            starts; if it comes in at p just for that, its start is p too.
    """

    value: int
    offset: int
    num_bytes: int
    start: int
    end: int


class Transfer(NamedTuple):
    """A value that moves.

    Attributes:
        value: Index of the value.
        link: The link that it takes.
        num_bytes: Bytes that move.
        start: Boundary at which it may begin.
        end: Boundary by which it has finished; between host and file later than `start`.
    """

    value: int
    link: Link
    num_bytes: int
    start: int
    end: int


class Copy(NamedTuple):
    """A value below the device.

    Attributes:
        value: Index of the value.
        tier: Host or file.
        num_bytes: Bytes that it takes there.
        start: First boundary: the start of the transfer that writes it. A copy of a value that no
            step changes lives from 0 to N.
        end: Last boundary, exclusive; later than the end of every transfer that reads it.
    """

    value: int
    tier: Tier
    num_bytes: int
    start: int
    end: int


class Measured(Protocol):
    """The part of a report on steps that `penstock.planner.refine` uses."""

    @property
    def operator_seconds(self) -> Sequence[float | None]:
        """Seconds of each operator of the planned graph; None where it does not run."""
        ...

    @property
    def bytes_per_second(self) -> Mapping[str, float]:
        """Bytes per second of each link, by its value; 0 where nothing moved."""
        ...


class Found(NamedTuple):
    """The state of a search.

    Attributes:
        elapsed_seconds: Since it began.
        step_seconds: Of the best plan so far, by the search's own replay.
        lower_bound_seconds: Lower bound of any plan.
    """

    elapsed_seconds: float
    step_seconds: float
    lower_bound_seconds: float


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bound of the time of a step, for plans under the same frozen decisions.

    Attributes:
        seconds: The largest of the bounds.
        binding: Name of the one that is the largest.
        seconds_of: Each bound by name: `"compute"`, `"cut"`, `"persistent"`, `"chain"`,
            `"remaking"`, `"exclusion"`, `"residency_lp"`, `"segments"`, `"windows"`; those that do
            not hold for the free decisions are missing.
        reorder: Whether it holds for other orders than the program's.
        recompute: Whether it holds for plans in which operators run again.
    """

    seconds: float
    binding: str
    seconds_of: Mapping[str, float]
    reorder: bool = True
    recompute: bool = True


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of each tier that a plan may use.

    Attributes:
        device_bytes: Of the device, workspace included; None: as many as needed.
        host_bytes: Of the host tier; None: there is no separate one.
        file_bytes: Of the file tier; None: there is none.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    file_bytes: int | None = None
