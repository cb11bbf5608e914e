"""The staging pool never holds more than its budget, and requests that wait are served in turn."""

import gc
import random
import threading
import time

import pytest

from _waiting import wait_until
from penstock.errors import CapacityError
from penstock.memory import StagingBuffer, StagingPool

PAGE = 4096


def in_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


def test_buffers_are_aligned_writable_and_separate():
    pool = StagingPool("1MiB")
    buffers = [pool.acquire(num_bytes) for num_bytes in (1, PAGE, 5000)]
    assert all(buffer.address % PAGE == 0 for buffer in buffers)
    assert [len(buffer.view) for buffer in buffers] == [1, PAGE, 5000]
    for value, buffer in enumerate(buffers):
        buffer.view[:] = bytes([value]) * buffer.num_bytes
    assert [buffer.view[-1] for buffer in buffers] == [0, 1, 2]
    assert pool.used_bytes == 4 * PAGE
    assert pool.mapped_bytes == pool.peak_bytes == 2**20


def test_a_buffer_is_reused_by_the_next_request():
    pool = StagingPool(4 * PAGE)
    with pool.acquire(2 * PAGE) as buffer:
        address = buffer.address
    assert pool.used_bytes == 0
    assert pool.acquire(2 * PAGE - 1).address == address


def test_unused_slabs_make_room_for_a_longer_buffer():
    pool = StagingPool(4 * PAGE, slab_bytes=PAGE)
    held = [pool.acquire(PAGE) for _ in range(4)]
    held.pop().release()
    assert pool.try_acquire(2 * PAGE) is None
    assert pool.mapped_bytes == 4 * PAGE  # nothing is unmapped where that would not do
    for buffer in held[:2]:
        buffer.release()
    large = pool.acquire(3 * PAGE)
    assert pool.used_bytes == pool.mapped_bytes == pool.peak_bytes == 4 * PAGE
    large.release()
    held[2].release()
    pool.acquire(4 * PAGE)
    assert pool.peak_bytes == 4 * PAGE


def test_slabs_are_made_known_once_and_taken_back():
    known: dict[int, int] = {}
    pool = StagingPool(
        5 * PAGE,
        slab_bytes=2 * PAGE,
        on_map=known.__setitem__,
        on_unmap=lambda address, num_bytes: known.pop(address),
    )
    held = [pool.acquire(PAGE) for _ in range(4)]
    assert list(known.values()) == [2 * PAGE, 2 * PAGE]
    held.append(pool.acquire(PAGE))
    assert list(known.values()) == [2 * PAGE, 2 * PAGE, PAGE]  # no more than the budget has left
    for buffer in held:
        buffer.release()
    pool.acquire(4 * PAGE).release()
    assert sum(known.values()) == pool.mapped_bytes <= 5 * PAGE
    pool.close()
    assert known == {}
    assert pool.mapped_bytes == 0


def test_a_slab_that_a_device_refuses_is_not_lent():
    refuse = True

    def on_map(address: int, num_bytes: int):
        if refuse:
            raise OSError("no more locked memory")

    pool = StagingPool(PAGE, on_map=on_map)
    for borrow in (pool.acquire, pool.try_acquire):
        with pytest.raises(OSError, match="locked"):
            borrow(PAGE)
    assert pool.mapped_bytes == 0
    refuse = False
    assert pool.acquire(PAGE, timeout=0).num_bytes == PAGE


def test_trying_never_waits_and_never_overtakes():
    pool = StagingPool(2 * PAGE)
    held = pool.try_acquire(PAGE)
    assert held is not None
    assert pool.try_acquire(2 * PAGE) is None
    assert pool.try_acquire(3 * PAGE) is None
    waiter = in_thread(lambda: pool.acquire(2 * PAGE).release())
    wait_until(lambda: pool._waiting)
    assert pool.try_acquire(PAGE) is None  # there is room, but another request is first
    held.release()
    waiter.join(timeout=10)
    assert pool.try_acquire(2 * PAGE) is not None


def test_releasing_twice_counts_once():
    pool = StagingPool(4 * PAGE)
    buffer, other = pool.acquire(PAGE), pool.acquire(PAGE)
    buffer.release()
    buffer.release()
    assert pool.used_bytes == PAGE
    other.release()
    assert pool.used_bytes == 0


def test_a_buffer_that_dies_goes_back():
    pool = StagingPool(PAGE)
    pool.acquire(PAGE)
    gc.collect()
    assert pool.used_bytes == 0
    pool.acquire(PAGE, timeout=0)


def test_a_request_beyond_the_budget_is_refused_at_once():
    pool = StagingPool(2 * PAGE + 1)
    with pytest.raises(CapacityError, match="exceeds the whole budget"):
        pool.acquire(2 * PAGE + 1)
    pool.acquire(2 * PAGE)


def test_without_room_in_time_there_is_an_error():
    pool = StagingPool(2 * PAGE)
    held = pool.acquire(PAGE)
    for timeout in (0, 0.05):
        start = time.monotonic()
        with pytest.raises(CapacityError, match=r"4\.00 KiB of 8\.00 KiB are lent out"):
            pool.acquire(2 * PAGE, timeout=timeout)
        assert time.monotonic() - start >= timeout
    held.release()
    pool.acquire(2 * PAGE, timeout=0)


def test_who_waits_goes_on_when_there_is_room():
    pool = StagingPool(2 * PAGE)
    held = [pool.acquire(PAGE), pool.acquire(PAGE)]
    got: list[StagingBuffer] = []
    thread = in_thread(lambda: got.append(pool.acquire(2 * PAGE)))
    wait_until(lambda: pool._waiting)
    held.pop().release()
    time.sleep(0.02)
    assert got == []
    held.pop().release()
    thread.join(timeout=10)
    assert len(got) == 1
    assert pool.peak_bytes == 2 * PAGE


def test_first_come_first_served():
    """A large request is not overtaken by small ones that would fit."""
    pool = StagingPool(2 * PAGE)
    held = pool.acquire(PAGE)
    order: list[str] = []

    def take(name: str, num_bytes: int):
        with pool.acquire(num_bytes):
            order.append(name)

    large = in_thread(take, "large", 2 * PAGE)
    wait_until(lambda: len(pool._waiting) == 1)
    small = in_thread(take, "small", PAGE)
    wait_until(lambda: len(pool._waiting) == 2)
    time.sleep(0.02)
    assert order == []
    held.release()
    large.join(timeout=10)
    small.join(timeout=10)
    assert order == ["large", "small"]


def test_giving_up_lets_the_next_one_through():
    pool = StagingPool(2 * PAGE)
    held = pool.acquire(PAGE)

    def give_up():
        with pytest.raises(CapacityError):
            pool.acquire(2 * PAGE, timeout=0.1)

    impatient = in_thread(give_up)
    wait_until(lambda: pool._waiting or not impatient.is_alive())
    start = time.monotonic()
    pool.acquire(PAGE, timeout=60).release()
    assert time.monotonic() - start < 30
    impatient.join()
    held.release()


def test_release_never_waits():
    """A destructor may run while its own thread is in the middle of `acquire`."""
    pool = StagingPool(PAGE)
    buffer = pool.acquire(PAGE)
    waiter = in_thread(lambda: pool.acquire(PAGE).release())
    wait_until(lambda: pool._waiting)
    with pool._mailbox:
        buffer.release()  # a lock that waited would hang here
    waiter.join(timeout=10)  # it is woken although no other call is made
    assert not waiter.is_alive()
    assert pool.used_bytes == 0


def test_many_threads_stay_within_the_budget():
    pool = StagingPool(8 * PAGE)
    broken: list[str] = []

    def work(seed: int):
        choose = random.Random(seed)
        for _ in range(100):
            with pool.acquire(choose.randrange(1, 8 * PAGE)) as buffer:
                buffer.view[:1] = buffer.view[-1:] = bytes([seed])
                time.sleep(0)
                if buffer.view[0] != seed or buffer.view[-1] != seed:
                    broken.append("two threads had the same memory")

    threads = [in_thread(work, seed) for seed in range(6)]
    for thread in threads:
        thread.join(timeout=60)
    assert broken == []
    assert pool.used_bytes == 0
    assert pool.peak_bytes <= 8 * PAGE


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_a_buffer_has_at_least_a_byte(num_bytes: int):
    for borrow in (StagingPool(PAGE).acquire, StagingPool(PAGE).try_acquire):
        with pytest.raises(ValueError, match="num_bytes must be at least 1"):
            borrow(num_bytes)


def test_the_budget_is_a_size():
    with pytest.raises(ValueError, match="budget_bytes must be"):
        StagingPool(-1)
