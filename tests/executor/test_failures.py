"""Steps that fail, caused for real: undone, or the error says what is torn; then it goes on."""

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from _planned import CASES, bound, differences, eagerly, everything, trainee
from fork_servers import find_python
from penstock.errors import (
    NonFiniteLossError,
    StoreFullError,
    StoreReadError,
    StoreWriteError,
    TornStepError,
)
from penstock.memory import _transfers

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]
CASE, OPTIMIZER = "mixture", "adamw"
FILE = {"share": 1 / 3, "tier": "file"}
HOST = {"share": 1 / 3, "tier": "host"}


class Fault:
    """Makes one transfer with the file fail: the n-th from when it is armed."""

    def __init__(self, monkeypatch):
        self.left: dict[str, int | None] = {"read": None, "write": None}
        self.error = errno.EIO
        self.count = {"read": 0, "write": 0}
        for kind, name in (("read", "_preadv"), ("write", "_pwritev")):
            real = getattr(_transfers, name)
            monkeypatch.setattr(_transfers, name, self._failing(kind, real))

    def _failing(self, kind, real):
        def move(fd, buffers, offset):
            self.count[kind] += 1
            left = self.left[kind]
            if left is not None:
                self.left[kind] = left - 1
                if left < 1:
                    raise OSError(self.error, os.strerror(self.error))
            return real(fd, buffers, offset)

        return move


@pytest.fixture
def fault(monkeypatch):
    return Fault(monkeypatch)


def two_steps(failing_step, store, where, error):
    """A step, one that fails, and what follows; returns the error and all that was before it."""
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    step = bound(CASE, OPTIMIZER, model, stepper, store=store, **where)
    torch.manual_seed(1)
    losses = [step(case.batch)]
    before = everything(model, stepper, losses)
    with pytest.raises(error) as caught:
        failing_step(step, case.batch)
    return step, model, stepper, losses, before, caught.value


def goes_on(step, model, stepper, losses):
    """After a step that was undone, training is as if it had not been."""
    losses += [step(CASES[CASE].batch) for _ in range(2)]
    found = everything(model, stepper, losses)
    step.close()
    return differences(eagerly(CASE, OPTIMIZER, 3), found, "")


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("number", [0, 1, 3, 6, 10, 15, 22, 30])
def test_a_disk_that_fails_anywhere(kind, number, fault, store):
    """Whatever transfer fails, tensors are as before the step, or are named."""
    error = StoreReadError if kind == "read" else StoreWriteError

    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    step = bound(CASE, OPTIMIZER, model, stepper, store=store, **FILE)
    torch.manual_seed(1)
    losses = [step(case.batch)]
    before = [everything(model, stepper, losses)]
    fault.left[kind] = number
    failed = None
    try:
        for _ in range(2):
            losses.append(step(case.batch))
            before.append(everything(model, stepper, losses))
    except (error, TornStepError) as caught:
        failed = caught
    fault.left[kind] = None
    assert failed is not None, "no transfer failed"
    if isinstance(failed, error):
        assert differences(before[-1], everything(model, stepper, losses), "") == []
        losses += [step(case.batch) for _ in range(4 - len(losses))]
        found = everything(model, stepper, losses)
        assert differences(eagerly(CASE, OPTIMIZER, 4), found, "") == []
    else:
        assert isinstance(failed.__cause__, error)
        _check_names(model, stepper, before[-1], failed, len(losses) + 1)
    step.close()


def _check_names(model, stepper, before, failed, num_steps):
    """Tensors that are not named are as before the step; those named as updated as after it."""
    after = eagerly(CASE, OPTIMIZER, num_steps)
    names = {f"model.{name}": ("model", name) for name in model.state_dict()}
    for number, (owner, _) in enumerate(model.named_parameters()):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            names[f"optimizer.state.{owner}.{key}"] = ("optimizer", number, key)
    now = everything(model, stepper, [])

    def look_up(where, path):
        for key in path:
            where = where[key]
        return where

    assert {*failed.updated, *failed.lost} <= names.keys()
    for name, path in names.items():
        if name in failed.lost:
            continue
        expected = after if name in failed.updated else before
        assert torch.equal(look_up(now, path), look_up(expected, path)), name


def test_a_disk_that_runs_full(fault, store):
    fault.error = errno.ENOSPC

    def failing_step(step, batch):
        fault.left["write"] = 0
        try:
            step(batch)
        finally:
            fault.left["write"] = None

    step, model, stepper, losses, before, _ = two_steps(failing_step, store, FILE, StoreFullError)
    assert differences(before, everything(model, stepper, losses), "") == []
    assert goes_on(step, model, stepper, losses) == []


@pytest.mark.parametrize("where", [HOST, FILE])
def test_a_loss_that_is_not_finite(where, store):
    def failing_step(step, batch):
        step(torch.full_like(batch, float("nan")))

    step, model, stepper, losses, before, error = two_steps(
        failing_step, store, where, NonFiniteLossError
    )
    assert error.loss != error.loss
    assert differences(before, everything(model, stepper, losses), "") == []
    assert goes_on(step, model, stepper, losses) == []


def test_running_statistics_are_undone_too(store):
    case = CASES["resnet"]
    model, stepper = trainee(case, OPTIMIZER)
    options = {"store": store, "share": 1 / 2, "tier": "host"}
    with bound("resnet", OPTIMIZER, model, stepper, **options) as step:
        step(case.batch)
        before = everything(model, stepper, [])
        with pytest.raises(NonFiniteLossError):
            step(torch.full_like(case.batch, float("nan")))
        assert differences(before, everything(model, stepper, []), "") == []


@pytest.mark.parametrize("where", [HOST, FILE])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_ctrl_c_in_the_middle_of_a_step(part, where, store):
    """Before the update it is undone; the message says so."""

    def failing_step(step, batch):
        execution = step._current
        calls = list(execution._calls)
        commit = execution._executable.positions.index(execution._recovery.commit)
        index = int(part * commit)
        call = calls[index]

        def interrupted():
            os.kill(os.getpid(), signal.SIGINT)
            call()

        calls[index] = interrupted
        execution._calls = calls
        step(batch)

    step, model, stepper, losses, before, error = two_steps(
        failing_step, store, where, KeyboardInterrupt
    )
    assert "as before this step" in error.__notes__[0]
    assert differences(before, everything(model, stepper, losses), "") == []
    step._current._calls = step._current._executable.calls
    assert goes_on(step, model, stepper, losses) == []


def test_ctrl_c_in_the_middle_of_an_update_comes_after_it(store):
    """There is no way back, so the update is finished first."""

    def failing_step(step, batch):
        execution = step._current
        calls = list(execution._calls)
        call = calls[-1]

        def interrupted():
            os.kill(os.getpid(), signal.SIGINT)
            call()

        calls[-1] = interrupted
        execution._calls = calls
        step(batch)

    step, model, stepper, _, _, _ = two_steps(failing_step, store, HOST, KeyboardInterrupt)
    after = everything(model, stepper, [])
    expected = eagerly(CASE, OPTIMIZER, 2) | {"losses": []}
    assert differences(expected, after, "") == []
    step.close()


@pytest.mark.parametrize("number", [0.0, 0.4, 0.8, 0.95])
def test_an_operator_that_raises(number, store):
    """In the update the error names what is torn; before it, all is as it was."""

    def failing_step(step, batch):
        execution = step._current
        calls = list(execution._calls)

        def broken():
            raise MemoryError("none left")

        calls[int(number * len(calls))] = broken
        execution._calls = calls
        step(batch)

    step, model, stepper, losses, before, error = two_steps(
        failing_step, store, HOST, (MemoryError, TornStepError)
    )
    if isinstance(error, TornStepError):
        _check_names(model, stepper, before, error, 2)
    else:
        assert differences(before, everything(model, stepper, losses), "") == []
        step._current._calls = step._current._executable.calls
        assert goes_on(step, model, stepper, losses) == []
    step.close()


def test_a_process_that_is_killed_leaves_no_files(store):
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from _planned import CASES, bound, trainee
        case = CASES["mixture"]
        model, stepper = trainee(case, "adamw")
        step = bound("mixture", "adamw", model, stepper, share=1 / 3, tier="file",
                     store=Path(sys.argv[1]))
        while True:
            step(case.batch)
            print("ready", flush=True)
        """
    )
    path = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [find_python("dynamo"), "-c", script, str(store)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
    assert list(store.iterdir()) == []
