"""Training side by side: eagerly, and as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _steps import Case, differences, eager_step
from _zoo import CASES as ZOO
from penstock.errors import InfeasibleError
from penstock.executor import PlannedStep, bind
from penstock.graph import StepGraph, capture
from penstock.planner import Plan, plan
from penstock.planner.paging import peak_of_program_order

MACHINE = "v100-16gb-pcie3"
LAYERS = {
    "gpt2": "n_layer",
    "t5": "num_layers",
    **dict.fromkeys(("llama", "bert", "vit"), "num_hidden_layers"),
}
# With one layer (T5: of each kind), as most tests have them, and "deep ..." with two.
CASES = {
    **ZOO,
    **{f"deep {name}": ZOO[name] for name in LAYERS},
    **{
        name: ZOO[name]._replace(make=functools.partial(ZOO[name].make, **{layers: 1}))
        for name, layers in LAYERS.items()
    },
}
Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr_decay=0.1),
}


def trainee(case: Case, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model with its optimizer every time."""
    torch.manual_seed(0)
    model = case.make()
    return model, OPTIMIZERS[optimizer](model.parameters())


@functools.cache
def graph_of(case: str, optimizer: str) -> StepGraph:
    """The captured step of a case of the zoo."""
    model, stepper = trainee(CASES[case], optimizer)
    return capture(model, stepper, CASES[case].batch, loss=CASES[case].loss)


@functools.cache
def full_plan(case: str, optimizer: str) -> Plan:
    """The plan with all the memory that it wants."""
    return plan(graph_of(case, optimizer), machine=MACHINE, time_limit=0.05)


@functools.cache
def plan_of(case: str, optimizer: str, share: float, tier: str, **options: Any) -> Plan:
    """The full plan, or one for a share as `plan_share` makes it."""
    if share >= 1:
        return full_plan(case, optimizer)
    return plan_share(graph_of(case, optimizer), share, tier, **options)


def plan_share(graph: StepGraph, share: float, tier: str, **options: Any) -> Plan:
    """A plan for a share of what the program takes, or for the least that is feasible."""
    return plan_within(graph, int(peak_of_program_order(graph) * share), tier, **options)


def plan_within(graph: StepGraph, device_bytes: int, tier: str, **options: Any) -> Plan:
    """A plan for so many bytes, or for the least that is feasible."""
    below = {"store": "/tmp"} if tier == "file" else {"host_memory": "1GiB"}
    given = {"machine": MACHINE, "time_limit": 0.05, **below, **options}
    try:
        return plan(graph, device_memory=device_bytes, **given)
    except InfeasibleError as error:
        return plan(graph, device_memory=error.sufficient_device_bytes or 0, **given)


def bound(
    case: str,
    optimizer: str,
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    *,
    share: float,
    tier: str,
    store: Path,
    debug: bool = False,
    shadow: int | None = None,
) -> PlannedStep:
    """Bind a plan of a case of the zoo."""
    return bind(
        plan_of(case, optimizer, share, tier),
        model,
        stepper,
        graph=graph_of(case, optimizer),
        loss=CASES[case].loss,
        store=store if tier == "file" else None,
        debug=debug,
        shadow=shadow,
    )


def everything(
    model: nn.Module, stepper: torch.optim.Optimizer, losses: list[torch.Tensor]
) -> dict[str, Any]:
    """All that training changes, copied."""
    return {
        "losses": losses,
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": {
            number: {key: torch.as_tensor(value).clone() for key, value in state.items()}
            for number, state in stepper.state_dict()["state"].items()
        },
        "random": torch.get_rng_state(),
    }


@functools.cache
def eagerly(case: str, optimizer: str, num_steps: int) -> dict[str, Any]:
    """Results of ordinary training, for comparisons only."""
    model, stepper = trainee(CASES[case], optimizer)
    torch.manual_seed(1)
    losses = [eager_step(model, stepper, CASES[case]) for _ in range(num_steps)]
    return everything(model, stepper, losses)


def unlike_eager(
    case: str,
    optimizer: str,
    *,
    share: float,
    tier: str,
    store: Path,
    num_steps: int = 3,
    debug: bool = True,
    shadow: int | None = None,
) -> list[str]:
    """Names of what differs between ordinary and planned training."""
    model, stepper = trainee(CASES[case], optimizer)
    options: dict[str, Any] = {"store": store, "debug": debug, "shadow": shadow}
    with bound(case, optimizer, model, stepper, share=share, tier=tier, **options) as step:
        torch.manual_seed(1)
        losses = [step(CASES[case].batch) for _ in range(num_steps)]
        found = everything(model, stepper, losses)
    afterwards = everything(model, stepper, losses)
    expected = eagerly(case, optimizer, num_steps)
    return differences(expected, found, "") + differences(found, afterwards, "closed")
