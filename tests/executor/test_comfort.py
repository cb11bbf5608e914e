"""What users meet around planned steps: reports after the end, threads, ranks, names in errors."""

import threading

import pytest
import torch
from torch import nn

import penstock
from _planned import MACHINE
from penstock.errors import GraphFileError

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"machine": MACHINE, "time_limit": 0.2, "cache": False, "device_memory": "64MiB"}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def fitted(**group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **group)
    loss_of = lambda output, batch: output.square().mean()  # noqa: E731
    return model, optimizer, penstock.fit(model, optimizer, X, loss=loss_of, **OPTIONS)


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


def test_ranks_that_do_not_hear_of_each_other_are_warned(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.warns(UserWarning, match="average_gradients"):
        fitted()
