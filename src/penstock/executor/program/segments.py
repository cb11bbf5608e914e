"""Segments: runs of plain operators that a device records and replays, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.executor.device.base import Device
from penstock.executor.program.executable import BoundaryStage, Executable
from penstock.executor.program.operators import Call

_MIN_CALLS = 4  # below it recording gains nothing


class Segments:
    """An executable in which each segment of plain operators is one call.

    A segment is recorded the first time that it is called; if that fails it runs call by call.

    Attributes:
        calls: The calls in their order.
    """

    def __init__(self, executable: Executable, device: Device) -> None:
        self.calls: list[Call] = []
        self._executable = executable
        self._begins: list[int] = []
        begin = 0
        while begin < len(executable.calls):
            end = begin
            while end < len(executable.calls) and executable.plain[end]:
                end += 1
            self._begins.append(begin)
            if end - begin >= _MIN_CALLS:
                self.calls.append(_CallSegment(executable.calls[begin:end], device))
                begin = end
            else:
                self.calls.append(executable.calls[begin])
                begin += 1

    def locate(self, index: int) -> tuple[int, BoundaryStage]:
        """Return position and stage of a call that failed."""
        call = self.calls[index]
        at = self._begins[index] + (call.at if isinstance(call, _CallSegment) else 0)
        return self._executable.positions[at], self._executable.stages[at]

    @property
    def num_recorded(self) -> int:
        """Operators that are replayed."""
        segments = [
            call for call in self.calls if isinstance(call, _CallSegment) and call.is_recorded
        ]
        return sum(len(segment.calls) for segment in segments)


class _CallSegment:
    """Consecutive operators.

    Attributes:
        at: The index of the last call, while they are called one by one.
    """

    def __init__(self, calls: Sequence[Call], device: Device) -> None:
        self.calls = calls
        self.at = 0
        self._device = device
        self._replay: Call | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the operators are replayed."""
        return self._replay is not None and self._replay != self._run_one_by_one

    def __call__(self) -> None:
        if self._replay is None:
            self._replay = self._device.record(self.calls)
            if self._replay is not None:
                return
            self._replay = self._run_one_by_one
        self._replay()

    def _run_one_by_one(self) -> None:
        for at, call in enumerate(self.calls):
            self.at = at
            call()
