"""Signals with handlers that raise, at any moment of a step: undone or done, never in between."""

import os
import signal
import threading

import pytest
import torch

import _signal_fuzz
from _planned import CASES, bound, differences, everything, trainee
from penstock.executor.run._recovery import StepRecovery

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]
CASE, OPTIMIZER = _signal_fuzz.CASE, _signal_fuzz.OPTIMIZER
WHERE = {"share": 1 / 3, "tier": "host"}


class Exits(BaseException):
    """Raised by a handler."""


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def number(request):
    """A signal with a handler that raises."""

    def exits(*_):
        raise Exits

    previous = signal.signal(request.param, exits)
    yield request.param
    signal.signal(request.param, previous)


def interrupted_at(index, number, store, *, monkeypatch=None):
    """A step, and one with a signal at one of its calls; states before and after, and the error."""
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    step = bound(CASE, OPTIMIZER, model, stepper, store=store, **WHERE)
    torch.manual_seed(1)
    step(case.batch)
    before = everything(model, stepper, [])
    execution = step._current
    calls = list(execution._calls)
    call = calls[index]

    def interrupted():
        os.kill(os.getpid(), number)
        call()

    calls[index] = interrupted
    execution._calls = calls
    with pytest.raises(Exits) as caught:
        step(case.batch)
    return before, everything(model, stepper, []), caught.value


@pytest.mark.parametrize("index", [0, 40])
def test_a_handler_that_raises_before_the_update_is_undone(index, number, store):
    before, after, error = interrupted_at(index, number, store)
    assert "as before this step" in error.__notes__[0]
    assert differences(before, after, "") == []


def test_a_handler_that_raises_in_the_update_does_so_after_it(number, store):
    before, after, _ = interrupted_at(-1, number, store)
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    torch.manual_seed(1)
    for _ in range(2):
        _signal_fuzz.eager_step(model, stepper, case)
    assert differences(everything(model, stepper, []), after, "") == []
    assert differences(before, after, "")


def test_signals_while_a_step_is_undone_wait_for_that(number, store, monkeypatch):
    restore = StepRecovery.restore

    def interrupted(self, *arguments):
        for _ in range(3):
            os.kill(os.getpid(), number)
        return restore(self, *arguments)

    monkeypatch.setattr(StepRecovery, "restore", interrupted)
    before, after, _ = interrupted_at(40, number, store)
    assert differences(before, after, "") == []


def test_handlers_are_the_users_again(number, store):
    handler = signal.getsignal(number)
    interrupted_at(-1, number, store)
    assert signal.getsignal(number) is handler


def test_a_handler_that_only_takes_note_does_not_stop_the_step(store):
    came = []
    previous = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        case = CASES[CASE]
        model, stepper = trainee(case, OPTIMIZER)
        with bound(CASE, OPTIMIZER, model, stepper, store=store, **WHERE) as step:
            timer = threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            step(case.batch)
            timer.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert came == [1]


@pytest.mark.parametrize("tier", ["host", "file"])
def test_signals_at_random_moments(tier, store):
    """In full: `_signal_fuzz.py --num 2000 --signal SIGINT`."""
    outcomes = _signal_fuzz.fuzz(signal.SIGTERM, 25, tier, store)
    assert not outcomes["torn"] + outcomes["wrong"]
    assert outcomes["undone"] + outcomes["done"]
    assert list(store.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_processes_leave_no_file(store):
    outcomes = _signal_fuzz.kill(5, "file", store)
    assert outcomes == {"killed": 5, "files left": 0}
