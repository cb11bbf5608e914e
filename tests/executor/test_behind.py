"""Steps on a device that computes behind the program, as a GPU does; here on a simulated one."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from _planned import CASES, bound, eagerly, everything, graph_of, trainee
from _steps import differences
from penstock.compat.autograd import set_grad_enabled
from penstock.errors import GraphFileError
from penstock.executor import bind
from penstock.executor.device.base import Device
from penstock.executor.device.links import ThreadLink
from penstock.executor.program.executable import BoundaryStage, Executable, Segments
from penstock.executor.run import binder, report
from penstock.executor.run._loss import LossCheck
from penstock.executor.run.execution import Execution
from penstock.executor.run.interrupts import Interrupts
from penstock.planner import plan
from simulated_cuda import Event, SimulatedCuda

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TIMED = 2
NUM_STEPS = 1 + NUM_TIMED + 2  # the first, those that are timed, one that records, one that replays


class LateDevice(Device):
    """Runs what it is given on a stream of a device that is not there."""

    is_behind = True

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.stream = cuda.Stream()
        self.num_recorded = 0

    def mark(self) -> Event:
        return self.stream.record_event()

    def wait_for(self, mark: Event) -> None:
        mark.synchronize()

    def start_reading(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = torch.empty_like(value)
        self.stream.launch(lambda: copy.copy_(value))
        arrived = self.mark()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return copy

        return wait

    def synchronize(self) -> None:
        self.stream.synchronize()

    def run_timed(self, calls: Sequence[Callable[[], object]], ends_ns: list[int]) -> None:
        for call in calls:
            call()
            self.synchronize()
            ends_ns.append(time.perf_counter_ns())

    def record(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        self.num_recorded += len(calls)

        def replay() -> None:
            for call in calls:
                call()

        replay()
        return replay


@pytest.fixture(params=[True, False], ids=["when waited for", "soon"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """Steps that are bound run on a late device."""
    cuda = SimulatedCuda(late=request.param)
    device = LateDevice(cuda)
    add, run = Executable.add, Execution._run

    def add_late(
        self: Executable, call: Any, *args: Any, first: Any = None, **options: Any
    ) -> None:
        wrapped = [_late(device, each, options) for each in (call, first or call)]
        add(self, wrapped[0], *args, first=wrapped[1], **options)

    def run_and_wait(self: Execution) -> None:
        run(self)
        device.synchronize()  # versions count when an operator is launched; here when it runs

    monkeypatch.setattr(report, "_MAX_STEPS", NUM_TIMED)
    monkeypatch.setattr(binder, "device_of", lambda graph: device)
    monkeypatch.setattr(Executable, "add", add_late)
    monkeypatch.setattr(Execution, "_run", run_and_wait)
    yield device
    cuda.close()


def _late(device: LateDevice, call: Any, options: Any) -> Callable[[], object]:
    function = call.func if isinstance(call, functools.partial) else None
    owner = getattr(function or call, "__self__", None)
    if isinstance(owner, (ThreadLink, Interrupts)) or _reads_loss(function or call):
        return call
    if options.get("is_plain") or function is set_grad_enabled:
        return lambda: device.stream.launch(call)

    def run() -> None:  # it may look at results
        device.synchronize()
        call()

    return run


def _reads_loss(call: Any) -> bool:
    methods = (LossCheck.start_reading, LossCheck.check_early)
    return getattr(call, "__func__", None) in methods


@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("case", ["gpt2", "resnet", "lstm"])
def test_the_bits_are_those_of_eager_training(case, tier, store, late):
    expected = eagerly(case, "adamw", NUM_STEPS)
    model, stepper = trainee(CASES[case], "adamw")
    with bound(case, "adamw", model, stepper, share=1 / 4, tier=tier, store=store) as step:
        torch.manual_seed(1)
        losses = [step(CASES[case].batch) for _ in range(NUM_STEPS)]
        found = step.report()
    assert differences(expected, everything(model, stepper, losses), "") == []
    assert sum(found.moved_bytes.values()) > 0
    assert found.num_recorded == late.num_recorded
    # With a transfer after every few operators, as plans of the others may have, none are worth it.
    assert found.num_recorded > 0 or case != "gpt2"


def test_the_backward_pass_is_under_way_when_the_loss_is_checked(store, late, monkeypatch):
    check = LossCheck.check_early
    behind: list[int] = []

    def check_and_count(self: LossCheck) -> None:
        check(self)
        behind.append(len(late.stream.operations))

    monkeypatch.setattr(LossCheck, "check_early", check_and_count)
    model, stepper = trainee(CASES["gpt2"], "adamw")
    with bound("gpt2", "adamw", model, stepper, share=1, tier="host", store=store) as step:
        for _ in range(NUM_STEPS):
            step(CASES["gpt2"].batch)
    assert len(behind) == NUM_STEPS
    assert behind[-1] > 0 or not late.stream.cuda.late


def test_what_cannot_be_recorded_runs_one_by_one_and_says_where_it_fails(late):
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no luck")

    executable = Executable()
    calls = [lambda n=n: ran.append(n) for n in range(5)]
    for position, call in enumerate([*calls, fail, *calls]):
        executable.calls.append(call)
        executable.positions.append(position)
        executable.stages.append(BoundaryStage.RUNNING)
        executable.plain.append(position != 1)
    device = Device()  # which records nothing
    segments = Segments(executable, device)
    assert len(segments.calls) == 3  # two that are too few, and the rest
    for _ in range(2):
        ran.clear()
        *before, last = segments.calls
        for call in before:
            call()
        with pytest.raises(ValueError, match="no luck"):
            last()
        assert ran == [0, 1, 2, 3, 4]
        assert segments.locate(len(before)) == (5, BoundaryStage.RUNNING)
    assert segments.num_recorded == 0


def test_a_step_of_a_device_that_is_not_here_is_refused(tmp_path):
    model, stepper = trainee(CASES["resnet"], "sgd")
    graph = dataclasses.replace(graph_of("resnet", "sgd"), device="xpu")
    found = plan(graph, machine="h200", time_limit=0.05)
    with pytest.raises(GraphFileError, match="'xpu', and there is no such device here"):
        bind(found, model, stepper, graph=graph)
