"""Planned steps at their edges: reports after the end, threads, ranks, names in errors."""

import threading

import pytest
import torch
from torch import nn

import penstock
from _planned import MACHINE
from penstock.errors import CaptureError, GraphFileError

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"machine": MACHINE, "time_limit": 0.05, "cache": False, "device_memory": "64MiB"}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def fitted(before_step=None, **group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **group)
    loss_of = lambda output, batch: output.square().mean()  # noqa: E731
    options = {"loss": loss_of, "before_step": before_step and before_step(model), **OPTIONS}
    return model, optimizer, penstock.fit(model, optimizer, X, **options)


def test_the_report_is_there_after_the_end():
    *_, step = fitted()
    with step:
        step(X)
    assert step.report().num_steps == 1
    assert step.report().disk_alone_seconds == 0


def test_threads_take_turns():
    expected, *_, alone = fitted()
    for _ in range(20):
        alone(X)
    model, _, step = fitted()
    threads = [threading.Thread(target=lambda: [step(X) for _ in range(10)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_hyper_parameter_that_branches_is_named():
    _, optimizer, step = fitted(weight_decay=0.0)
    step(X)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(GraphFileError, match=r"param_groups\.0\.weight_decay is 0\.1"):
        step(X)


def test_ranks_whose_gradients_nothing_averages_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(CaptureError, match="average_gradients"):
        fitted()
    clip = lambda model: lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    with pytest.raises(CaptureError, match="average_gradients"):
        fitted(before_step=clip)


def test_optimizers_that_others_have_wrapped_are_refused_by_name():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Wrapped around .* SGD; pass optimizer\.optimizer"):
        penstock.capture(model, Wrapped(torch.optim.SGD(model.parameters())), X)  # type: ignore
