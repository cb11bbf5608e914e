"""The throttle keeps its rate for requests of any length; mostly on a clock that tests move."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory import Throttle, _transfers


class Clock:
    """Stands in for the module `time`; sleeping moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_transfers, "time", clock)
    return clock


def test_a_request_takes_as_long_as_on_a_slow_device(clock: Clock):
    throttle = Throttle(1000)
    throttle.acquire(500)
    assert clock.now == pytest.approx(1000.5)
    throttle.acquire(2500)
    assert clock.now == pytest.approx(1003.0)


def test_the_real_transfer_between_requests_is_not_counted_twice(clock: Clock):
    throttle = Throttle(1000)
    for _ in range(10):
        throttle.acquire(100)
        clock.now += 0.005
    assert clock.now == pytest.approx(1001.0, abs=0.011)


def test_idle_time_is_no_credit_beyond_ten_milliseconds(clock: Clock):
    throttle = Throttle(1000)
    clock.now += 3600
    start = clock.now
    throttle.acquire(1000)
    assert clock.now == pytest.approx(start + 1 - 0.010)


@given(
    rate=st.floats(1e3, 1e10),
    requests=st.lists(st.tuples(st.integers(0, 2**24), st.floats(0, 0.1)), min_size=1),
)
def test_the_rate_is_never_exceeded(rate: float, requests: list[tuple[int, float]]):
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(_transfers, "time", clock)
        throttle = Throttle(rate)
        start, num_bytes = clock.now, 0
        for length, idle_seconds in requests:
            clock.now += idle_seconds
            throttle.acquire(length)
            num_bytes += length
            assert num_bytes <= rate * (clock.now - start + 0.010) * (1 + 1e-6)


class SharedClock(Clock):
    """Clock that moves on to the next wake-up once all its threads sleep."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.num_awake = num_threads
        self.wakes: list[float] = []

    def sleep(self, seconds: float) -> None:
        with self.changed:
            wake = self.now + seconds
            self.wakes.append(wake)
            self.stop()
            self.changed.wait_for(lambda: self.now >= wake)

    def stop(self) -> None:
        """A thread sleeps, or has ended."""
        with self.changed:
            self.num_awake -= 1
            if self.num_awake == 0 and self.wakes:
                self.now = min(self.wakes)
                self.num_awake = self.wakes.count(self.now)
                self.wakes = [wake for wake in self.wakes if wake > self.now]
                self.changed.notify_all()


def test_threads_share_the_rate_and_none_is_starved(monkeypatch: pytest.MonkeyPatch):
    clock = SharedClock(4)
    monkeypatch.setattr(_transfers, "time", clock)
    throttle, start = Throttle(1e6), clock.now
    ends: dict[int, float] = {}

    def work(index: int):
        for _ in range(5):
            throttle.acquire(5000)
        ends[index] = clock.now - start
        clock.stop()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(ends.values()) == pytest.approx(0.1, abs=0.011)
    # First come first served: the last turn of each lies in the last fifth of the time.
    assert min(ends.values()) >= 0.08 - 0.011


def test_a_long_request_does_not_hold_the_lock_while_it_sleeps(monkeypatch: pytest.MonkeyPatch):
    throttle = Throttle(1000)

    class Checks(Clock):
        def sleep(self, seconds: float) -> None:
            assert not throttle._lock.locked()
            super().sleep(seconds)

    monkeypatch.setattr(_transfers, "time", Checks())
    throttle.acquire(5000)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_the_rate_must_be_above_zero(rate: float):
    with pytest.raises(ValueError, match="bytes_per_second must be above 0"):
        Throttle(rate)
