"""Links: transfers that run behind the computation, one after the other, once they are released.

The computation releases a link's transfers up to one of them, and waits until one has finished.
Both count transfers through all steps, so a wait that is over already costs one comparison, and no
thread is woken that does not sleep.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.compat.threads import Thread
from penstock.executor.device.base import Device, Mark
from penstock.memory import Ledger, Link

_logger = logging.getLogger(__name__)


class ThreadLink:
    """A thread that carries out the transfers of one link.

    Args:
        link: The link.
        moves: A step's transfers in their order; each returns when its bytes have arrived.
        num_bytes: Bytes of each.
        ledger: Records transfers and stalls.
        device: The device that operators run on.

    Attributes:
        num_moves: Transfers of a step.
        base: Transfers of all steps before this one.
        done: Transfers that have finished, of all steps.
    """

    def __init__(
        self,
        link: Link,
        moves: Sequence[Callable[[], None]],
        num_bytes: Sequence[int],
        ledger: Ledger,
        device: Device,
    ) -> None:
        self.link = link
        self._device = device if device.is_behind else None
        self._marks: deque[tuple[int, Mark]] = deque()  # numbers of transfers, each with its mark
        self.num_moves = len(moves)
        self.base = self.num_moves  # transfers across the first step's beginning count as done
        self.done = self.num_moves
        self._moves = moves
        self._num_bytes = num_bytes
        self._ledger = ledger
        self._released = self.done
        self._idle = False  # True while the thread sleeps, or is about to: then it has to be woken
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopped = False
        self._changed = threading.Condition()
        self._awaited: int | None = None
        self._error: BaseException | None = None
        self._halted = False
        self._busy = False
        self._thread: threading.Thread | None = None

    def release(self, count: int) -> None:
        """Let the first `count` transfers of this step begin."""
        if self._device is not None:
            self._marks.append((self.base + count, self._device.mark()))
        self._released = self.base + count
        if self._thread is None:
            name = f"penstock-{self.link.value}"
            self._thread = Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        elif self._idle:
            self._wake.put(None)

    def wait(self, count: int) -> None:
        """Wait for the first `count` transfers of this step; below 1 they are the last step's.

        Raises:
            StoreError: One of them failed.
        """
        if self.done - self.base < count or self._error is not None:
            self._wait(self.base + count)

    def next_step(self) -> None:
        """Count from the next step on."""
        self.base += self.num_moves

    def halt(self) -> None:
        """Begin no further transfer, and wait for the one that is under way."""
        with self._changed:
            self._halted = True
            while self._busy:
                self._changed.wait()

    def drain(self) -> None:
        """Wait for all transfers that were released."""
        with self._changed:
            while self.done < self._released and self._error is None:
                self._changed.wait()
        if self._error is not None:
            raise self._error

    def reset(self) -> None:
        """Forget releases and errors after `halt`: the next step is as the first one."""
        with self._changed:
            self._error, self._awaited = None, None
            self._marks.clear()
            self.done = self._released = self.base
            self._halted = False

    def stop(self) -> None:
        """End the thread after the transfer that is under way."""
        self._halted = self._stopped = True
        self._wake.put(None)
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wait(self, target: int) -> None:
        begin = time.perf_counter_ns()
        with self._changed:
            self._awaited = target
            while self.done < target and self._error is None:
                self._changed.wait()
            self._awaited = None
        self._ledger.record_stall(self.link.value, begin, time.perf_counter_ns())
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._stopped:
            if self._can_continue():
                self._carry_out_released()
                continue
            # `release` writes `_released` and then reads `_idle`; here it is the other way round,
            # so one of the two sees the other's write.
            self._idle = True
            if not self._can_continue():
                self._wake.get()
            self._idle = False

    def _can_continue(self) -> bool:
        return self.done < self._released and not self._halted and self._error is None

    def _carry_out_released(self) -> None:
        """Carry out all released transfers."""
        with self._changed:
            if not self._can_continue():  # halted in between
                return
            self._busy = True
        try:
            self._carry_out()
        except BaseException as error:
            _logger.debug("a transfer %s failed: %s", self.link.value, error)
            self._error = error
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _carry_out(self) -> None:
        while self._can_continue():
            index = self.done % self.num_moves
            if self._device is not None:
                self._wait_for_release(self._device)
            begin = time.perf_counter_ns()
            self._moves[index]()
            end = time.perf_counter_ns()
            self._ledger.record_transfer(self.link, self._num_bytes[index], begin, end)
            with self._changed:
                self.done += 1
                if self._awaited is not None and self.done >= self._awaited:
                    self._changed.notify_all()

    def _wait_for_release(self, device: Device) -> None:
        """Wait until the computation has reached the release of the next transfer."""
        while self._marks and self._marks[0][0] <= self.done:
            self._marks.popleft()
        if self._marks:
            device.wait_for(self._marks[0][1])
