"""Planned training is ordinary training, bit for bit: loss, model, optimizer, random state.

Freed memory is poisoned and transfers are compared (`debug=True`), so a value that is used where
the plan does not have it spoils the loss.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from _planned import (
    CASES,
    MACHINE,
    bind,
    capture,
    everything,
    full_plan,
    graph_of,
    plan,
    trainee,
    unlike_eager,
)
from _steps import Case, differences, eager_step
from penstock.errors import InfeasibleError

pytestmark = pytest.mark.usefixtures("one_thread")
# Each model of Transformers adds to a registry, which its forward pass reads.
UNCHECKED = pytest.mark.filterwarnings(
    "ignore:len.*changed since the step was captured:UserWarning"
)
MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "lstm")
DEEP = ("gpt2", "t5")  # whose layers share what they have: the others' are the same once more


@UNCHECKED
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", MODELS)
def test_a_quarter_of_the_memory_with_a_file(case, optimizer, store):
    """Of more than one layer with SGD, whose update has few operators.

    Steps are compared with the program, as is the default, where the optimizer is AdamW.
    """
    shadow = None
    if optimizer == "sgd":
        case, shadow = f"deep {case}" if case in DEEP else case, 0
    options = {"share": 1 / 4, "tier": "file", "store": store, "shadow": shadow}
    assert unlike_eager(case, optimizer, **options) == []


@UNCHECKED
@pytest.mark.parametrize("case", MODELS)
def test_the_least_memory_with_the_host(case, store):
    options = {"share": 1 / 12, "tier": "host", "store": store, "shadow": 0}
    assert unlike_eager(case, "adamw", **options) == []


@pytest.mark.parametrize("case", ["gpt2", "resnet"])
@pytest.mark.parametrize(("share", "tier"), [(1, "host"), (1 / 2, "host"), (1 / 2, "file")])
def test_more_memory(case, share, tier, store):
    assert unlike_eager(case, "sgd", share=share, tier=tier, store=store) == []


@pytest.mark.parametrize("optimizer", ["fused adamw", "foreach adamw", "nadam", "adagrad"])
def test_other_optimizers(optimizer, store):
    assert unlike_eager("mixture", optimizer, share=1 / 2, tier="host", store=store) == []


@given(
    percent=st.integers(10, 100),
    reorder=st.booleans(),
    recompute=st.booleans(),
    seed=st.integers(0, 3),
)
@settings(max_examples=12)
def test_plans_of_all_sorts(percent, reorder, recompute, seed):
    graph = graph_of("lstm", "adamw")
    try:
        found = plan(
            graph,
            device_memory=full_plan("lstm", "adamw").peak_device_bytes * percent // 100,
            host_memory="1GiB",
            machine=MACHINE,
            time_limit=0.05,
            reorder=reorder,
            recompute=recompute,
            seed=seed,
        )
    except InfeasibleError:
        return
    assert losses_of(found) == losses_of_full_plan()


def losses_of(planned):
    case = CASES["lstm"]
    model, stepper = trainee(case, "adamw")
    graph = graph_of("lstm", "adamw")
    with bind(planned, model, stepper, graph=graph, loss=case.loss, debug=True, shadow=0) as step:
        return [step(case.batch).item() for _ in range(3)]


@functools.cache
def losses_of_full_plan():
    return losses_of(full_plan("lstm", "adamw"))


class Noisy(nn.Module):
    """Layers whose noise is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.dropout(layer(x), 0.3) * x.sin()
        return x


def test_noise_is_drawn_again_as_it_was():
    batch = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    case = Case(Noisy, batch, lambda y, batch: y.square().mean())
    (eager, eager_sgd), (model, sgd) = trainee(case, "sgd"), trainee(case, "sgd")
    graph = capture(model, sgd, batch, loss=case.loss)
    tight = plan(graph, device_memory="350KB", host_memory=0, machine=MACHINE, time_limit=5)
    operators = tight.planned_graph(graph).operators
    assert any(operators[tight.order[position]].random for position in tight.recomputed)
    torch.manual_seed(1)
    losses = [eager_step(eager, eager_sgd, case) for _ in range(3)]
    expected = everything(eager, eager_sgd, losses)
    torch.manual_seed(1)
    with bind(tight, model, sgd, graph=graph, loss=case.loss, debug=True, shadow=0) as step:
        losses = [step(batch) for _ in range(3)]
    assert differences(expected, everything(model, sgd, losses), "") == []
