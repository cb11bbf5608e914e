"""Reads that are under way when a signal's handler raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock.memory import StartedReads


class EndedReads:
    """Reads that have ended, of which some were not whole."""

    def __init__(self, is_whole: list[bool]) -> None:
        self.is_whole = np.array(is_whole)

    def have_ended(self) -> bool:
        return True

    def finish(self) -> np.ndarray:
        return self.is_whole


@pytest.mark.parametrize("where", ["first repeat", "second repeat", "end"])
def test_an_interrupt_leaves_nothing_unread(where: str):
    interrupts = [where]
    repeated, returned = [], []

    def pass_by(place: str) -> None:
        if place in interrupts:
            interrupts.remove(place)
            raise KeyboardInterrupt

    @contextmanager
    def lend() -> Iterator[int]:
        yield 3
        returned.append(True)

    class Lent:
        """The descriptor; an interrupt comes before it is given back."""

        def __init__(self) -> None:
            self.lent = lend()
            self.lent.__enter__()

        def __exit__(self, *error: Any) -> None:
            pass_by("end")
            self.lent.__exit__(None, None, None)

    def repeat(offset: int, *_: int) -> None:
        pass_by("first repeat" if offset == 4096 else "second repeat")
        repeated.append(offset)

    requests = np.array([[0, 1, 2], [4096, 1, 2], [8192, 1, 2]])
    kinds: Any = EndedReads([True, False, False]), Lent()
    reads = StartedReads(kinds[0], requests, repeat, kinds[1])
    with pytest.raises(KeyboardInterrupt):
        reads.exception()
    assert reads.exception() is None
    assert repeated == [4096, 8192]
    assert returned == [True]
    assert reads.end_ns >= reads.start_ns
    assert reads.exception() is None and repeated == [4096, 8192]
