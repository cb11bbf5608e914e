"""The engine's threads when an exception out of nowhere comes while they are started."""

import threading
from collections.abc import Callable

import pytest

from _waiting import wait_until
from penstock.activations._transfers import Callbacks, Changed, Reaper, Workers

NAME = "penstock-test"


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would also stop pytest."""


@pytest.fixture
def changed() -> Changed:
    return Changed(threading.Lock())


def workers(changed: Changed) -> tuple[Workers, list[object]]:
    moved: list[object] = []

    def fail(record: object, error: BaseException) -> None:
        moved.append(error)

    callbacks = Callbacks(changed, lambda: None, fail)
    made = Workers(callbacks, moved.append, name="test", num_threads=3)
    return made, moved


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(NAME)]


def interrupted_after(num_started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next start of a thread but so many raise, once."""
    start: Callable[[threading.Thread], None] = threading.Thread.start
    left = [num_started]

    def start_or_raise(thread: threading.Thread) -> None:
        if not left[0]:
            monkeypatch.setattr(threading.Thread, "start", start)
            raise Interrupted
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_raise)


@pytest.mark.parametrize("num_started", [0, 1, 2])
def test_threads_of_an_interrupted_start_end_and_others_come(num_started, changed, monkeypatch):
    made, moved = workers(changed)
    interrupted_after(num_started, monkeypatch)
    with pytest.raises(Interrupted), changed.lock:
        made.put("first")  # pyright: ignore[reportArgumentType]
    for thread in threads():
        thread.join(10)
    assert threads() == []
    with changed.lock:
        made.put("second")  # pyright: ignore[reportArgumentType]
    with changed.lock:
        assert len(moved) == 2 or len(threads()) == 3
        ended = made.stop()
    for thread in ended:
        thread.join(10)
    assert threads() == []


def test_stopping_after_an_interrupted_start_waits_for_none(changed, monkeypatch):
    made, _ = workers(changed)
    interrupted_after(1, monkeypatch)
    with pytest.raises(Interrupted), changed.lock:
        made.put("first")  # pyright: ignore[reportArgumentType]
    with changed.lock:
        ended = made.stop()
    for thread in ended:
        thread.join(10)


def test_a_reaper_that_was_interrupted_starts_again(changed, monkeypatch):
    collected = threading.Event()
    reaper = Reaper(threading.Lock(), collected.set)
    interrupted_after(0, monkeypatch)
    with pytest.raises(Interrupted):
        reaper.start()
    reaper.start()
    reaper.on_death(object())  # pyright: ignore[reportArgumentType]
    assert collected.wait(10)
    reaper.stop()


def test_a_record_wakes_one_thread_and_changes_of_the_engine_wake_none(changed):
    made, moved = workers(changed)
    with changed.lock:
        made.put("first")  # pyright: ignore[reportArgumentType]
    idle = made._has_work._waiting
    wait_until(lambda: len(idle) == 3 and len(moved) == 1)
    with changed.lock:
        changed.notify_all()
        assert len(idle) == 3
        made.put("second")  # pyright: ignore[reportArgumentType]
        made.put("third")  # pyright: ignore[reportArgumentType]
        assert len(idle) == 1
    wait_until(lambda: len(idle) == 3 and len(moved) == 3)
    with changed.lock:
        ended = made.stop()
        assert not idle
    for thread in ended:
        thread.join(10)
