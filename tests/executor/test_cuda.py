"""Planned steps on a GPU: eager's bits, the plan's memory, recorded operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _planned import OPTIMIZERS, everything, plan_within, trainee
from _steps import differences
from _zoo import CASES
from penstock.errors import NonFiniteLossError
from penstock.executor import PlannedStep, bind
from penstock.graph import StepGraph, capture
from penstock.planner import Plan, plan
from test_host_values import HostValues

pytestmark = pytest.mark.gpu

NUM_STEPS = 9  # more than are timed


def there(value: Any) -> Any:
    """Tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {name: there(each) for name, each in value.items()}
    return tuple(map(there, value)) if isinstance(value, tuple) else value


def trainee_there(case: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = trainee(CASES[case], optimizer)
    model.cuda()
    return model, OPTIMIZERS[optimizer](model.parameters())


def graph_there(case: str, optimizer: str) -> StepGraph:
    model, stepper = trainee_there(case, optimizer)
    batch = there(CASES[case].batch)
    return capture(model, stepper, batch, loss=CASES[case].loss)


def eager_step(case: str, model: nn.Module, stepper: torch.optim.Optimizer) -> torch.Tensor:
    batch = there(CASES[case].batch)
    stepper.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    loss_of = CASES[case].loss
    loss = getattr(output, "loss", output) if loss_of is None else loss_of(output, batch)
    loss.backward()
    stepper.step()
    return loss.detach()


def bound_there(
    found: Plan, graph: StepGraph, case: str, optimizer: str, store: Any, **options: Any
) -> tuple[PlannedStep, nn.Module, torch.optim.Optimizer]:
    model, stepper = trainee_there(case, optimizer)
    loss = CASES[case].loss
    step = bind(found, model, stepper, graph=graph, loss=loss, store=store, **options)
    return step, model, stepper


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("case", ["gpt2", "resnet", "mixture"])
def test_the_bits_are_those_of_eager_training(case, tier, debug, store):
    graph = graph_there(case, "adamw")
    full = plan(graph, machine="h200", time_limit=1)
    found = plan_within(graph, full.peak_device_bytes // 4, tier, machine="h200")
    model, stepper = trainee_there(case, "adamw")
    torch.manual_seed(1)
    losses = [eager_step(case, model, stepper) for _ in range(NUM_STEPS)]
    expected = everything(model, stepper, losses)
    where = store if tier == "file" else None
    step, model, stepper = bound_there(found, graph, case, "adamw", where, debug=debug)
    with step:
        torch.manual_seed(1)
        losses = [step(there(CASES[case].batch)) for _ in range(NUM_STEPS)]
        report = step.report()
    assert differences(expected, everything(model, stepper, losses), "") == []
    assert sum(report.moved_bytes.values()) > 0
    assert not (report.num_recorded and debug)
    # Operators with a transfer before each, as those of the others, are not recorded.
    assert report.num_recorded > 0 or debug or case != "gpt2"


def test_what_the_step_makes_on_the_cpu_is_as_in_eager_training():
    def train(planned: bool) -> Any:
        torch.manual_seed(0)
        model, batch = HostValues().cuda(), torch.randn(4, 64, device="cuda")
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not planned:
            losses = []
            for _ in range(NUM_STEPS):
                stepper.zero_grad()
                loss = model(batch)
                loss.backward()
                stepper.step()
                losses.append(loss.detach())
            return everything(model, stepper, losses)
        graph = capture(model, stepper, batch)
        full = plan(graph, machine="h200", time_limit=1)
        found = plan_within(graph, full.peak_device_bytes // 2, "host", machine="h200")
        with bind(found, model, stepper, graph=graph) as step:
            losses = [step(batch) for _ in range(NUM_STEPS)]
        return everything(model, stepper, losses)

    assert differences(train(False), train(True), "") == []


def test_memory_is_the_plan():
    graph = graph_there("gpt2", "sgd")
    found = plan(graph, machine="h200", time_limit=1)
    model, stepper = trainee_there("gpt2", "sgd")
    batch = there(CASES["gpt2"].batch)
    step = bind(found, model, stepper, graph=graph, loss=CASES["gpt2"].loss, shadow=0)
    with step:
        for _ in range(NUM_STEPS):
            step(batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        report = step.report()
        grown = torch.cuda.max_memory_allocated() - before
    assert report.arena_bytes == found.arena_bytes
    assert grown <= report.workspace_bytes + (1 << 20)


def test_reserved_memory_is_arena_and_workspace():
    """Of torch's allocator: one segment each, one for small tensors, and cuBLAS' own."""
    graph = graph_there("gpt2", "sgd")
    found = plan(graph, machine="h200", time_limit=1)
    step, *_ = bound_there(found, graph, "gpt2", "sgd", None, shadow=0)
    batch = there(CASES["gpt2"].batch)
    with step:
        step(batch)
        first = step.report().held_bytes
        reserved = torch.cuda.memory_reserved()
        for _ in range(NUM_STEPS):
            step(batch)
        report = step.report()
        assert report.held_bytes == first, "nothing is taken after the first step"
        # Recordings keep the generator's seed and offset in a segment for small tensors.
        assert torch.cuda.memory_reserved() - reserved in (0, 2 << 20)
    segments = sum(_segment(each) for each in (report.arena_bytes, report.workspace_bytes))
    assert first == segments + (2 << 20)


def _segment(num_bytes: int) -> int:
    """Return the bytes that torch's allocator takes for a tensor."""
    if num_bytes <= 1 << 20:
        return 0  # from the segment for small ones
    return 20 << 20 if num_bytes < 10 << 20 else -(-num_bytes // (2 << 20)) * (2 << 20)


def test_a_loss_that_is_no_number_leaves_everything_as_it_was():
    graph = graph_there("resnet", "sgd")
    found = plan(graph, machine="h200", time_limit=1)
    step, model, stepper = bound_there(found, graph, "resnet", "sgd", None)
    batch = there(CASES["resnet"].batch)
    with step:
        losses = [step(batch) for _ in range(NUM_STEPS)]
        before = everything(model, stepper, losses)
        with pytest.raises(NonFiniteLossError):
            step(batch * torch.nan)
        assert differences(before, everything(model, stepper, losses), "") == []
