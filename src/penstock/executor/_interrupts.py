"""Ctrl-C in the middle of a step: at once where the step can be undone, else after it.

Python raises KeyboardInterrupt between any two bytecodes, also between the two halves of an update.
While a step runs, a flag is set instead, which the step looks at where it can still be undone.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Holds Ctrl-C back during a `with` block, if it would raise KeyboardInterrupt here."""

    def __init__(self) -> None:
        self.came = False
        self._active = False

    def __enter__(self) -> Interrupts:
        self.came = False
        self._active = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._active:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise what was held back."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:  # the second one: whoever presses it twice does not want to wait
            raise KeyboardInterrupt
        self.came = True
