"""Rooflines: a function's bytes at each level of memory, and the time that each level takes.

A byte that is saved counts at the level that binds alone: processors hide the others behind it
(inline caches that save loads from L1 save no time: arXiv:2502.20547). So the time of a function is
predicted as that of its slowest level, with a roof for each:

    seconds = max(bytes of level / rate of level, operations / rate of arithmetic) + launches
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from penstock.codegen import count_bytes
from penstock.errors import PenstockError
from penstock.iomodel._access import AccessTrace, find_access, simulate_caches
from penstock.iomodel._levels import LevelBytes, level_rates, memory_levels
from penstock.iomodel._operators import trace_operators
from penstock.memory import MachineProfile

Source = Literal["declared", "operators", "interpreter"]
COMPUTE = "arithmetic"
_GPU_LINE_BYTES = 32  # a sector, the least that a GPU's L2 moves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """A function's bytes and operations, and the time that each level takes for them.

    Attributes:
        name: The function.
        source: Origin of the bytes: accesses that the function declares, torch's operators, or the
            loads and stores of Triton kernels.
        levels: Bytes at each level, the nearest first.
        seconds: By level, and for arithmetic, the time at its full rate; levels whose rate is
            unknown are left out.
        binding_level: The one that takes longest.
        num_launches: Operators or kernels.
        operations: Additions and multiplications of products.
        predicted_seconds: Time of the binding level, and of the launches.
        measured_seconds: Median over the repetitions; None where it was not measured.
    """

    name: str
    source: Source
    levels: tuple[LevelBytes, ...]
    seconds: dict[str, float]
    binding_level: str
    num_launches: int
    operations: int
    predicted_seconds: float
    measured_seconds: float | None

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes by level."""
        return {each.level: each.moved_bytes for each in self.levels}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedCall:
    """One call of a function: its accesses, before any machine.

    Attributes:
        name: The function.
        source: Origin of the accesses.
        trace: The accesses.
        num_launches: Operators or kernels.
        operations: Additions and multiplications of products.
    """

    name: str
    source: Source
    trace: AccessTrace
    num_launches: int
    operations: int


def count_call(function: functools.partial[object]) -> CountedCall:
    """Return the accesses of a call: declared, of Triton's kernels, or of torch's operators.

    Raises:
        PenstockError: Triton interprets, and a kernel is compiled all the same.
    """
    name = _find_name(function)
    access = find_access(function)
    if access is not None:
        trace = AccessTrace()
        access(trace)
        return CountedCall(name=name, source="declared", trace=trace, num_launches=1, operations=0)
    if _is_interpreting():
        trace = AccessTrace()
        count = count_bytes(function, visit=_visit_into(trace))
        if count.num_launches:
            launches = count.num_launches
            return CountedCall(
                name=name, source="interpreter", trace=trace, num_launches=launches, operations=0
            )
    trace, operators, operations = trace_operators(function)
    return CountedCall(
        name=name,
        source="operators",
        trace=trace,
        num_launches=operators,
        operations=operations,
    )


def _find_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__name__


def _is_interpreting() -> bool:
    """Return whether Triton was imported, with its interpreter on."""
    if "triton" not in sys.modules:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _visit_into(trace: AccessTrace) -> Callable[[str, Any, int], None]:
    """Return a visitor that adds the accesses of kernels, neighbours as one range."""

    def visit(kind: str, addresses: Any, item_bytes: int) -> None:
        begins = np.asarray(addresses).ravel().astype(np.int64)
        if not begins.size:
            return
        is_next = np.diff(begins) == item_bytes
        firsts = np.flatnonzero(np.concatenate([[True], ~is_next]))
        counts = np.diff(np.concatenate([firsts, [begins.size]]))
        if kind != "stored":
            trace.read(0, begins[firsts], counts * item_bytes)
        if kind != "loaded":
            trace.write(0, begins[firsts], counts * item_bytes)

    return visit


def predict(
    call: CountedCall,
    profile: MachineProfile,
    *,
    num_threads: int,
    measured_seconds: float | None,
) -> Roofline:
    """Return the bytes of a call at each level of a machine, and the times that they take.

    Raises:
        PenstockError: The machine has no rates.
    """
    levels = _count_levels(call, profile, num_threads)
    rates = level_rates(profile, num_threads)
    seconds = {
        each.level: each.moved_bytes / rates[each.level] for each in levels if each.level in rates
    }
    compute = profile.compute
    if compute is None or not seconds:
        raise PenstockError(
            f"the profile of {profile.device_name} has no rates of its memory; measure them with "
            "penstock.probe(refresh=True)"
        )
    if call.operations:
        seconds[COMPUTE] = call.operations / compute.flops_per_second["float32"]
    binding = max(seconds, key=lambda level: seconds[level])
    return Roofline(
        name=call.name,
        source=call.source,
        levels=levels,
        seconds=seconds,
        binding_level=binding,
        num_launches=call.num_launches,
        operations=call.operations,
        predicted_seconds=seconds[binding] + max(1, call.num_launches) * compute.launch_seconds,
        measured_seconds=measured_seconds,
    )


def _count_levels(
    call: CountedCall, profile: MachineProfile, num_threads: int
) -> tuple[LevelBytes, ...]:
    """Return what is asked of the first level, and what misses in each cache."""
    known = [each for each in memory_levels(profile) if each.name not in ("link", "file")]
    is_gpu = profile.device == "cuda"
    if is_gpu:  # shared memory is no cache
        known = [each for each in known if each.name != "shared"]
    caches, trace = known[:-1], call.trace
    # Each thread has the caches of its core, but for the last, which all share.
    capacities = [
        each.capacity_bytes * (1 if is_gpu or each is caches[-1] else num_threads)
        for each in caches
    ]
    line_bytes = _GPU_LINE_BYTES if is_gpu else 64
    if caches:
        line_bytes = _choose_line(trace, line_bytes, capacities[0])
    missed = simulate_caches(
        trace, capacities, line_bytes=line_bytes, allocates=not is_gpu, is_warm=True
    )
    first = LevelBytes(
        level=known[0].name, loaded_bytes=trace.read_bytes, stored_bytes=trace.written_bytes
    )
    behind = [
        dataclasses.replace(each, level=level.name)
        for each, level in zip(missed, known[1:], strict=True)
    ]
    return (first, *behind)


def _choose_line(trace: AccessTrace, line_bytes: int, least_capacity: int) -> int:
    """Return a line that is longer where ranges are long: many lines of a range move as one does.

    A sixteenth of a range, and of the smallest cache, is the most that such a line may err.
    """
    lengths = trace.arrays()[1]
    longest = min(int(lengths.mean()) if lengths.size else 0, least_capacity) // 16
    while 2 * line_bytes <= longest:
        line_bytes *= 2
    return line_bytes
