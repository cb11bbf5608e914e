"""Stretches of a program that a device can record and replay at once."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.executor._device import Device
from penstock.executor._operators import Call
from penstock.executor._program import Program, Stage

_LEAST = 4  # calls, below which recording gains nothing


class Stretches:
    """A program whose stretches of plain operators are one call each.

    Each is recorded the first time that it is called, or runs call by call if it cannot be.

    Args:
        program: The calls of a step.
        device: Where they run.

    Attributes:
        calls: What to call, in order.
    """

    def __init__(self, program: Program, device: Device) -> None:
        self.calls: list[Call] = []
        self._program = program
        self._begins: list[int] = []
        begin = 0
        while begin < len(program.calls):
            end = begin
            while end < len(program.calls) and program.plain[end]:
                end += 1
            if end - begin >= _LEAST:
                self.calls.append(_Stretch(program.calls[begin:end], device))
                self._begins.append(begin)
                begin = end
                continue
            self.calls.append(program.calls[begin])
            self._begins.append(begin)
            begin += 1

    def where(self, index: int) -> tuple[int, Stage]:
        """The position and stage of a call that failed."""
        call = self.calls[index]
        at = self._begins[index] + (call.at if isinstance(call, _Stretch) else 0)
        return self._program.positions[at], self._program.stages[at]

    @property
    def num_recorded(self) -> int:
        """Operators that are replayed."""
        return sum(
            len(call.calls)
            for call in self.calls
            if isinstance(call, _Stretch) and call.is_recorded
        )


class _Stretch:
    """Operators that follow each other.

    Attributes:
        at: Which of them was called last, while they are called one by one.
    """

    def __init__(self, calls: Sequence[Call], device: Device) -> None:
        self.calls = calls
        self.at = 0
        self._device = device
        self._replay: Call | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether they are replayed."""
        return self._replay is not None and self._replay != self._one_by_one

    def __call__(self) -> None:
        if self._replay is None:
            self._replay = self._device.recorded(self.calls)
            if self._replay is not None:
                return
            self._replay = self._one_by_one
        self._replay()

    def _one_by_one(self) -> None:
        for at, call in enumerate(self.calls):
            self.at = at
            call()
