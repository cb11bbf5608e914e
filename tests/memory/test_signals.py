"""Handlers that raise never tear an uninterrupted function in two, and are never forgotten."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from penstock.memory import _signals, deferred_signals, interruptible, uninterrupted
from penstock.memory._mailbox import Mailbox


class Came(BaseException):
    """Exception of a handler."""


def raising(number: int, frame: object) -> None:
    raise Came(number)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    monkeypatch.setattr(deferred_signals, "_users", {})  # whatever other tests left entered
    before = [signal.signal(number, raising) for number in numbers]
    deferred_signals.watch(raising)
    yield
    deferred_signals.unwatch(raising)
    assert [signal.getsignal(number) for number in numbers] == [raising] * 3
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


done: list[str] = []


@uninterrupted
def both(number: int = signal.SIGINT) -> str:
    done.append("first")
    signal.raise_signal(number)
    done.append("second")
    return "result"


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_runs_when_the_function_has_ended(number):
    with pytest.raises(Came):
        both(number)
    assert done == ["first", "second"] and not deferred_signals.pending


def test_it_waits_for_the_outermost_function():
    @uninterrupted
    def outer() -> None:
        both()
        done.append("outer")

    with pytest.raises(Came):
        outer()
    assert done == ["first", "second", "outer"]


def test_while_a_function_waits_handlers_run_at_once():
    @interruptible
    def wait() -> None:
        done.append("waits")
        signal.raise_signal(signal.SIGTERM)
        done.append("not reached")

    @uninterrupted
    def outer(*, before: bool) -> None:
        if before:
            signal.raise_signal(signal.SIGINT)
        try:
            wait()
        finally:
            done.append("cleaned up")

    with pytest.raises(Came):
        outer(before=False)
    with pytest.raises(Came):
        outer(before=True)
    assert done == ["waits", "cleaned up", "cleaned up"]


def test_a_handler_gets_the_callers_frame():
    def note(number: int, frame: object) -> None:
        done.append(frame.f_code.co_name)  # type: ignore[attr-defined]

    signal.signal(signal.SIGINT, note)
    deferred_signals.renew()
    assert both() == "result"
    assert done == [
        "first",
        "second",
        "test_a_handler_gets_the_callers_frame",
    ]
    deferred_signals.unwatch(raising)
    assert signal.signal(signal.SIGINT, raising) is note
    deferred_signals.watch(raising)


def test_all_that_came_is_delivered():
    @uninterrupted
    def two() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)

    with pytest.raises(Came):
        two()
    with pytest.raises(Came):
        uninterrupted(lambda: None)()
    assert not deferred_signals.pending


def test_a_signal_that_comes_again_much_later_is_not_held_back(monkeypatch):
    monkeypatch.setattr(_signals, "_PATIENCE_SECONDS", 0.01)

    @uninterrupted
    def hang() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)
        done.append("not reached")

    with pytest.raises(Came):
        hang()
    assert done == [] and not deferred_signals.pending


def test_a_watch_that_was_interrupted_counts_once(monkeypatch):
    renew = deferred_signals.renew

    def interrupted() -> None:
        monkeypatch.setattr(deferred_signals, "renew", renew)
        raise Came

    monkeypatch.setattr(deferred_signals, "renew", interrupted)
    with pytest.raises(Came):
        deferred_signals.watch(raising)
    deferred_signals.watch(raising)
    with pytest.raises(Came):
        both()
    assert done == ["first", "second"]


def test_a_handler_of_c_is_left_alone():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    deferred_signals.renew()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, raising)


def test_a_mailbox_is_not_left_locked():
    seen: list[int] = []

    def apply(number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(number)

    mailbox = Mailbox(apply)
    for number in range(3):
        with pytest.raises(Came):
            mailbox.put(number)
    with pytest.raises(Came):
        mailbox.read(lambda: signal.raise_signal(signal.SIGINT))
    assert seen == [0, 1, 2] and not mailbox._lock.locked()
