"""Explanations: the level of memory that a function's time follows, and leads that are false.

Bytes of Triton kernels are counted under Triton's interpreter (`TRITON_INTERPRET=1`), those of
other functions by a simulation of the caches over the accesses that they declare
(`declare_access`), or else over those of torch's operators. Caches are warm: they hold what the
call before left there.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.iomodel._levels import check_counts, this_machine
from penstock.iomodel._roofline import COMPUTE, CountedCall, Roofline, count_call, predict
from penstock.memory import MachineProfile, find_machine
from penstock.tables import Report
from penstock.units import format_bytes, format_seconds

_FASTER = 1.05  # times of a function that differ by less are the same
_FALLEN = 1.05  # bytes that fall by less have not
_FOLLOWS = 0.25  # of the bytes' gain: less than this in the time is a false lead
_LEAST_SECONDS = 0.005
_GPU = "h100-80gb"


@dataclasses.dataclass(frozen=True)
class IOReport(Report, title="penstock.iomodel.explain"):
    """The bytes of a function by level, and what they say of its time, perhaps against a base.

    Attributes:
        function: The function that was explained.
        base: The function that it is compared with; None without one.
        machine: Name of the device that the rates are of.
        was_busy: True if other processes used it while its rates were measured: times are too high.
    """

    function: Roofline
    base: Roofline | None
    machine: str
    was_busy: bool = False

    @property
    def predicted_gain(self) -> float | None:
        """Predicted time of the base over that of the function; None without a base."""
        if self.base is None:
            return None
        return self.base.predicted_seconds / self.function.predicted_seconds

    @property
    def measured_gain(self) -> float | None:
        """Measured time of the base over that of the function; None where one is missing."""
        if self.base is None or not self.base.measured_seconds:
            return None
        measured = self.function.measured_seconds
        return self.base.measured_seconds / measured if measured else None

    @property
    def is_faster(self) -> bool | None:
        """True if the function is predicted to be faster than the base, by 5 % or more."""
        return None if self.predicted_gain is None else self.predicted_gain >= _FASTER

    @property
    def false_lead(self) -> bool:
        """True if bytes fall at a level that does not bind, and the time does not follow."""
        if self.base is None:
            return False
        after = self.function.moved_bytes
        falls = {
            level: before / max(1, after.get(level, 0))
            for level, before in self.base.moved_bytes.items()
        }
        binding = self.base.binding_level
        elsewhere = max((fall for level, fall in falls.items() if level != binding), default=1.0)
        if elsewhere < _FALLEN:
            return False
        gain = self.measured_gain or self.predicted_gain or 1.0
        return gain - 1 < _FOLLOWS * (elsewhere - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them as plain data, for JSON."""
        return dataclasses.asdict(self) | {
            "predicted_gain": self.predicted_gain,
            "measured_gain": self.measured_gain,
            "is_faster": self.is_faster,
            "false_lead": self.false_lead,
        }

    def draw(self, path: str | Path) -> None:
        """Draw a roofline with one point for each level (PNG, SVG or PDF by the suffix).

        Raises:
            ImportError: matplotlib is missing; the extra `viz` brings it.
        """
        from penstock.iomodel._picture import draw_roofline

        draw_roofline(self.function, self.base, self.machine, Path(path))

    def _rows(self) -> list[tuple[str, object]]:
        rows: list[tuple[str, object]] = []
        for each in (self.function, self.base):
            if each is not None:
                rows += _write_rows(each, "function" if each is self.function else "base")
        if self.base is not None:
            gains = ((self.predicted_gain, "predicted"), (self.measured_gain, "measured"))
            rows += [(f"{name} gain", f"{gain:.2f} x") for gain, name in gains if gain is not None]
            rows.append(("false lead", self.false_lead))
        busy = ", busy when they were measured: predicted times are too high"
        return [*rows, ("rates of", self.machine + (busy if self.was_busy else ""))]


def _write_rows(of: Roofline, role: str) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [(role, f"{of.name}, bytes by {of.source}")]
    for each in of.levels:
        taken = of.seconds.get(each.level)
        text = f"{format_bytes(each.loaded_bytes)} loaded, {format_bytes(each.stored_bytes)} stored"
        text += "" if taken is None else f", {format_seconds(taken)}"
        rows.append(
            (f"  {each.level}", text + (", binds" if each.level == of.binding_level else ""))
        )
    if COMPUTE in of.seconds:
        text = f"{of.operations:.3g} operations, {format_seconds(of.seconds[COMPUTE])}"
        rows.append((f"  {COMPUTE}", text + (", binds" if of.binding_level == COMPUTE else "")))
    times = f"predicted {format_seconds(of.predicted_seconds)}"
    if of.measured_seconds is not None:
        times += f", measured {format_seconds(of.measured_seconds)}"
    return [*rows, ("  time", times)]


def explain(
    function: Callable[..., object],
    *args: Any,
    base: Callable[..., object] | None = None,
    machine: MachineProfile | str | None = None,
    num_threads: int | None = None,
    operations: int | None = None,
    repetitions: int = 7,
) -> IOReport:
    """Count a function's bytes at each level of memory, and find the level that binds its time.

    Example:
        >>> report = explain(torch.add, *torch.rand(2, 2**24))  # doctest: +SKIP
        >>> report.function.binding_level  # doctest: +SKIP
        'memory'

    Args:
        function: Called with the arguments.
        *args: The arguments, tensors on any device.
        base: A function of the same arguments that it is a variant of.
        machine: The rates, or the name of a machine; None: those of `penstock.probe`; of
            an H100 for interpreted kernels.
        num_threads: Threads that the function runs on; None: those of torch.
        operations: Additions and multiplications of the function; None: those of torch's products,
            of sparse tensors as if they were dense.
        repetitions: Times that each function is run, in turn; 0: not measured.

    Raises:
        TypeError: What is to be explained cannot be called, returns a generator, or uses tensors
            that are neither dense nor sparse.
        ValueError: A number is below what it can be, or a tensor is on the device meta.
        PenstockError: A kernel is not interpreted, or no rate is known.
    """
    check_counts(0, repetitions=repetitions, operations=operations or 0)
    check_counts(num_threads=1 if num_threads is None else num_threads)
    for each in (function, base or function):
        if not callable(each):
            raise TypeError(f"{each!r} cannot be called; pass a function, and its arguments")
    functions = [functools.partial(each, *args) for each in (function, base) if each is not None]
    calls = [count_call(each) for each in functions]
    is_interpreted = calls[0].source == "interpreter"
    profile = _choose_machine(is_interpreted) if machine is None else find_machine(machine)
    medians = measure_in_turn(functions, 0 if is_interpreted else repetitions)
    threads = num_threads or torch.get_num_threads()
    found = [
        predict(_with(call, operations), profile, num_threads=threads, measured_seconds=median)
        for call, median in zip(calls, medians, strict=True)
    ]
    return IOReport(found[0], found[1] if base else None, profile.device_name, profile.was_busy)


def _with(call: CountedCall, operations: int | None) -> CountedCall:
    return call if operations is None else dataclasses.replace(call, operations=operations)


def _choose_machine(is_interpreted: bool) -> MachineProfile:
    if is_interpreted and not torch.cuda.is_available():
        return find_machine(_GPU)
    return this_machine()


def measure_in_turn(
    functions: Sequence[Callable[[], object]], repetitions: int
) -> list[float | None]:
    """Return the median seconds of functions that run in turn, after each ran once.

    Short ones run several times for each measurement, so that it takes some milliseconds. Without
    repetitions nothing runs, and there are no seconds.
    """
    if not repetitions:
        return [None] * len(functions)
    is_cuda = torch.cuda.is_available()

    def run(function: Callable[[], object], times: int) -> float:
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            function()
        if is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    for function in functions:
        function()
    times = [max(1, round(_LEAST_SECONDS / max(run(each, 1), 1e-9))) for each in functions]
    rounds = [
        [run(each, count) for each, count in zip(functions, times, strict=True)]
        for _ in range(repetitions)
    ]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]
