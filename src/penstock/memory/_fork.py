"""Forks: a child owns no store, and no read may be in flight while it is made.

The child of a fork shares the parent's open files. If it wrote to or reused the parent's extents,
the parent would compute with wrong numbers, so a counter, which costs one comparison, identifies
a child. It also closes its copy of the files, or a child that outlives its parent would keep
the disk space.

The kernel may resolve a fork's copy-on-write in the parent while a direct read is under way, and
before Linux 6.3 the read then lands in the page that the child kept. Forks therefore wait for
reads.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

_logger = logging.getLogger(__name__)

_MAX_WAIT_SECONDS = 10.0


class SurvivesFork(Protocol):
    """Object that a child process must set right: close its files, renew its locks."""

    def _after_fork_in_child(self) -> None: ...


class _ReadGate:
    """Counts direct reads in flight; a fork waits until there are none and holds new ones back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal handler may fork here
        self._num_reads = 0

    def __enter__(self) -> None:
        with self._changed:
            self._num_reads += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_reads -= 1
            self._changed.notify_all()

    @property
    def lock(self) -> threading.Condition:
        """The lock that no fork is made under, to start reads that `call_before_fork` ends."""
        return self._changed

    def before_fork(self) -> None:
        """Wait for the reads in flight; the lock, kept over the fork, holds new ones back."""
        self._changed.acquire()
        # Bounded, because a read that never returns (a dead network disk) must not stop all forks.
        if not self._changed.wait_for(lambda: self._num_reads == 0, timeout=_MAX_WAIT_SECONDS):
            _logger.warning("forking although %d reads are still in flight", self._num_reads)
        for end in _before_fork:
            end()

    def after_fork(self) -> None:
        """Let reads go on."""
        self._changed.release()


read_gate = _ReadGate()
_generation = 0
_survivors: weakref.WeakSet[SurvivesFork] = weakref.WeakSet()
_before_fork: list[Callable[[], None]] = []


def generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _generation


def call_before_fork(end: Callable[[], None]) -> None:
    """Let forks call a function, while reads are held back, that ends those that were started."""
    _before_fork.append(end)


def set_right_in_children(survivor: SurvivesFork) -> None:
    """Let forked children call the method as their first act; the object is held weakly."""
    _survivors.add(survivor)


def _after_fork_in_child() -> None:
    global _generation, read_gate
    _generation += 1
    read_gate = _ReadGate()  # the old one may count reads of threads that the child does not have
    for survivor in list(_survivors):
        survivor._after_fork_in_child()


os.register_at_fork(
    before=lambda: read_gate.before_fork(),
    after_in_parent=lambda: read_gate.after_fork(),
    after_in_child=_after_fork_in_child,
)
