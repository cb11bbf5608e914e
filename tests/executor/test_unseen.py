"""Behaviour that the zoo's models do not have: planned as eager, or refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import penstock
from _planned import differences, everything, plan_share
from penstock.errors import CaptureError, GraphFileError, PenstockError
from penstock.executor import PlannedStep, bind
from penstock.graph import StepGraph, capture
from penstock.graph.capturing.step_program import call_model
from penstock.planner import Plan, plan

pytestmark = pytest.mark.usefixtures("one_thread")
MACHINE = "v100-16gb-pcie3"
WIDTH, ROWS = 32, 16

Between = Callable[[nn.Module, torch.optim.Optimizer, int], object]


class Model(nn.Module):
    """Two layers; what happens between them is given."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("kept", torch.ones(WIDTH, WIDTH))
        self.register_buffer("spread", torch.arange(float(WIDTH)).expand(ROWS, WIDTH))
        self.middle = forward or (lambda model, y: y.relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self, self.first(x))).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def bound(model: Any, stepper: Any, batch: Any, share: float) -> PlannedStep:
    return bound_as(planned(capture(model, stepper, batch), share), model, stepper)


def planned(graph: StepGraph, share: float = 1) -> tuple[StepGraph, Plan]:
    """A plan for a share of the memory that the program takes."""
    if share < 1:
        return graph, plan_share(graph, share, "host")
    return graph, plan(graph, machine=MACHINE, time_limit=0.05)


def bound_as(found: tuple[StepGraph, Plan], model: Any, stepper: Any) -> PlannedStep:
    """Bind a plan, of another model perhaps."""
    return bind(found[1], model, stepper, graph=found[0], debug=True)


@functools.cache
def plain(share: float = 1) -> tuple[StepGraph, Plan]:
    """The step of another model with a ReLU between its layers."""
    model = Model()
    return planned(capture(model, sgd(model.parameters()), batches()[0]), share)


def unlike_eager(
    make: Callable[[], nn.Module],
    batches: list[Any],
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    between: Between = lambda *_: None,
    shares: tuple[float, ...] = (0.5,),
) -> list[str]:
    """Train eagerly and as planned for each share of memory, with another batch each time; returns
    what differs.
    """
    ends, graph = [], None
    for share in (None, *shares):
        torch.manual_seed(0)
        model = make()
        stepper = optimizer(model.parameters())
        step = None
        if share is not None:
            graph = graph or capture(model, stepper, batches[0])
            step = bound_as(planned(graph, share), model, stepper)
        torch.manual_seed(1)
        losses = []
        for number, batch in enumerate(batches):
            between(model, stepper, number)
            if step is not None:
                losses.append(step(batch))
                continue
            stepper.zero_grad()
            loss = call_model(model, batch)
            loss.backward()
            stepper.step()
            losses.append(loss.detach())
        ends.append(everything(model, stepper, losses))
        if step is not None:
            step.close()
    eager, *others = ends
    return [name for each in others for name in differences(eager, each, "")]


def batches(number: int = 4, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*(shape or (ROWS, WIDTH)), generator=generator) for _ in range(number)]


def momentum_encoder(model: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.kept.data = model.kept.data * 0.9 + model.first.weight.data * 0.1
    return y @ model.kept


def moving_average(model: Any, y: torch.Tensor) -> torch.Tensor:
    model.kept.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - model.kept[0]


def turned_in_place(model: Any, y: torch.Tensor) -> torch.Tensor:
    z = (y[:, :ROWS] * 2).transpose_(0, 1).unsqueeze_(0).squeeze_(0)
    return y + torch.cat([z, z], 1)


MIDDLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a row of itself": lambda model, y: y - y[:1],
    "itself transposed": lambda model, y: y @ (model.kept * 2 - (model.kept * 2).T + model.kept),
    "where of itself": lambda model, y: (
        torch.where(y[:, :ROWS] > 0, y[:, :ROWS], y[:, :ROWS].T)
        .sum(1, keepdim=True)
        .expand(-1, WIDTH)
    ),
    "batch norm of strides": lambda model, y: model.norm(
        y.view(4, 4, WIDTH).transpose(1, 2)
    ).reshape(ROWS, WIDTH),
    "log sigmoid of strides": lambda model, y: F.logsigmoid(y.T).T,
    "power of strides": lambda model, y: torch.pow(2.0, y.T).mean(0, keepdim=True).T + y,
    "softplus of strides": lambda model, y: F.softplus(y + model.first.bias).T.contiguous().T,
    "turned in place": turned_in_place,
    "an expanded buffer": lambda model, y: y + model.spread,
    "an average that moves": moving_average,
    "data assigned": momentum_encoder,
    "as strided": lambda model, y: torch.as_strided_copy(y * 2, (ROWS, WIDTH), (1, ROWS), 0),
}


@pytest.mark.parametrize("middle", MIDDLES)
def test_what_a_model_does(middle):
    assert unlike_eager(lambda: Model(MIDDLES[middle]), batches(), shares=(1, 0.1)) == []


@pytest.mark.parametrize("middle", ["a row of itself", "softplus of strides"])
def test_twenty_steps(middle):
    make = lambda: Model(MIDDLES[middle])  # noqa: E731
    optimizer = torch.optim.AdamW
    assert unlike_eager(make, batches(20), optimizer=optimizer, shares=(0.1,)) == []


def test_batch_norms_that_average_over_all_batches():
    def make() -> nn.Module:
        model = Model(lambda model, y: model.norm(model.norm(y)))
        model.norm.momentum = None
        return model

    def start_anew(model: Any, stepper: Any, number: int) -> None:
        if number == 2:
            model.norm.reset_running_stats()

    assert unlike_eager(make, batches(4), between=start_anew, shares=(1, 0.1)) == []


def test_a_recurrent_layer_that_takes_the_batch_first():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].square().mean()

    assert unlike_eager(Recurrent, batches(3, 4, 6, WIDTH)) == []


def test_orthogonal_weights():
    def make() -> nn.Module:
        model = Model()
        parametrizations.orthogonal(model.second)
        return model

    assert unlike_eager(make, batches()) == []


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda each: torch.optim.SGD(each, 0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda each: torch.optim.Adam(each, amsgrad=True, weight_decay=0.1),
    "fused adam": lambda each: torch.optim.Adam(each, fused=True, amsgrad=True),
    "foreach sgd": lambda each: torch.optim.SGD(each, 0.05, weight_decay=0.1, foreach=True),
    "adamw": lambda each: torch.optim.AdamW(each, amsgrad=True, maximize=True),
    "adamax": lambda each: torch.optim.Adamax(each, weight_decay=0.1),
    "nadam": lambda each: torch.optim.NAdam(each, weight_decay=0.1),
    "rmsprop": lambda each: torch.optim.RMSprop(each, centered=True, momentum=0.5),
    "foreach rmsprop": lambda each: torch.optim.RMSprop(each, foreach=True),
    "adagrad": lambda each: torch.optim.Adagrad(each, lr_decay=0.1, weight_decay=0.1),
    "adadelta": lambda each: torch.optim.Adadelta(each, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    assert unlike_eager(Model, batches(), optimizer=OPTIMIZERS[optimizer], shares=(0.1,)) == []


class Labelled(nn.Module):
    """Looks at two tensors; numbers and None beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, y: Any = None, scale: float = 1.0, mask: Any = None) -> torch.Tensor:
        if dataclasses.is_dataclass(x):
            x, y = x.x, x.y  # type: ignore[attr-defined]
        return ((self.layer(x) - y) * scale).square().mean()


@dataclasses.dataclass(frozen=True)
class Pair:
    """A batch of a class of its own."""

    x: torch.Tensor
    y: torch.Tensor


def test_tensors_that_share_memory_in_the_first_batch_only():
    first, *others = batches(5)
    whole = torch.randn(ROWS + 1, WIDTH)
    given = [{"x": first, "y": first}, {"x": whole[1:], "y": whole[:-1]}]
    given += [{"x": x, "y": y} for x, y in zip(others, others[::-1], strict=True)]
    assert unlike_eager(Labelled, given) == []
    assert unlike_eager(Labelled, given[1:]) == []


def test_micro_batches_that_are_one_tensor_in_the_first_batch_only():
    losses = []
    for first in (batches(1) * 2, batches(2)):
        torch.manual_seed(0)
        model = Model()
        graph = capture(model, stepper := sgd(model.parameters()), first, accumulate=2)
        with bind(plan(graph, machine=MACHINE), model, stepper, graph=graph) as step:
            losses.append([step(batches(2)).item() for _ in range(2)])
    assert losses[0] == losses[1]


def test_a_dataclass():
    given = batches(6)
    assert unlike_eager(Labelled, [Pair(*pair) for pair in pairwise(given)]) == []


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"scale": 2.0}, ValueError, r"batch.scale is 2.0 and was 1.5"),
        ({"mask": True}, ValueError, r"batch.mask is True and was None"),
        ({"mask": {1, 2}}, TypeError, "batch.mask is a set"),
        ({"y": torch.zeros(ROWS, WIDTH).numpy()}, TypeError, "batch.y is a ndarray"),
    ],
)
def test_constants_of_a_batch_stay(other, error, message):
    x, y = batches(2)
    batch = {"x": x, "y": y, "scale": 1.5, "mask": None}
    model = Labelled()
    with bound(model, sgd(model.parameters()), batch, 1) as step:
        loss = step(batch)
        with pytest.raises(error, match=message):
            step(batch | other)
        assert step(batch) < loss


def change_mode(model: Any, stepper: Any) -> None:
    model.norm.eval()


def freeze(model: Any, stepper: Any) -> None:
    model.first.weight.requires_grad_(False)


def add_group(model: Any, stepper: Any) -> None:
    stepper.param_groups[0]["params"].pop()


def replace_module(model: Any, stepper: Any) -> None:
    model.second = nn.Linear(WIDTH, WIDTH)


def replace_parameter(model: Any, stepper: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def add_parameter(model: Any, stepper: Any) -> None:
    model.extra = nn.Parameter(torch.ones(3))
    stepper.add_param_group({"params": [model.extra]})


def hook_on_a_gradient(model: Any, stepper: Any) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 0.1)


def hook_after_accumulation(model: Any, stepper: Any) -> None:
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def hook_around_step(model: Any, stepper: Any) -> None:
    stepper.register_step_post_hook(lambda *_: None)


def another_step(model: Any, stepper: Any) -> None:
    stepper.step = lambda: None


CHANGES = {
    "'model.first.weight' has hooks on its gradient": hook_on_a_gradient,
    "'model.first.weight' has hooks on its grad": hook_after_accumulation,
    "the SGD has hooks around step": hook_around_step,
    "this SGD has a step of its own": another_step,
    "module 'model.norm' is in evaluation mode": change_mode,
    "requires_grad of 'model.first.weight' has changed": freeze,
    "the optimizer's groups have other parameters": add_group,
    "a module of the model has been replaced": replace_module,
    "'model.first.weight' is another parameter": replace_parameter,
    "parameters have been added or removed": add_parameter,
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_step_that_would_be_another_one_is_refused(message):
    model = Model()
    stepper = sgd(model.parameters())
    with bound_as(plain(), model, stepper) as step:
        step(batches()[0])
        before = everything(model, stepper, [])
        CHANGES[message](model, stepper)
        with pytest.raises(GraphFileError, match=message):
            step(batches()[1])
        after = everything(model, stepper, [])
        if CHANGES[message] not in (replace_module, add_parameter):
            assert differences(before["model"], after["model"], "") == []


def test_the_mode_at_the_capture_is_part_of_the_graph():
    model = Model()
    stepper = sgd(model.parameters())
    graph, found = planned(capture(model, stepper, batches()[0]))
    model.eval()
    with pytest.raises(GraphFileError, match="in evaluation mode and was not"):
        bind(found, model, stepper, graph=graph)


def test_autocast_around_a_step_is_refused():
    model = Model()
    with bound_as(plain(), model, sgd(model.parameters())) as step:
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(GraphFileError, match="autocast to bfloat16 is on"):
                step(batches()[0])
        step(batches()[0])


@pytest.mark.parametrize("accumulate", [None, 2])
def test_a_capture_within_autocast(accumulate: int | None):
    """Where autocast keeps the casts of parameters from one call of the program to the next."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    batch = x if accumulate is None else [x[:16], x[16:]]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    ours, theirs = models
    steppers = [sgd(each.parameters()) for each in models]

    def loss_of(out: torch.Tensor, _: object) -> torch.Tensor:
        return out.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(ours, steppers[0], batch, loss=loss_of, accumulate=accumulate)
    found = plan(graph, machine=MACHINE)
    with bind(found, ours, steppers[0], graph=graph, loss=loss_of, accumulate=accumulate) as step:
        for _ in range(3):
            loss = step(batch)
            steppers[1].zero_grad()
            expected = torch.zeros(())
            for part in [x] if accumulate is None else batch:
                with torch.autocast("cpu", torch.bfloat16):
                    each = loss_of(theirs(part), part) / (accumulate or 1)
                each.backward()
                expected += each.detach()
            steppers[1].step()
            assert torch.equal(loss, expected)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_owners_of_memory_are_not_copied(copy_of: Callable[[Any], Any], tmp_path: Path):
    model = Model()
    with bound_as(plain(), model, sgd(model.parameters())) as step:
        with pytest.raises(PenstockError, match=r"PlannedStep owns memory .* or fit another step"):
            copy_of(step)
    with pytest.raises(PenstockError, match=r"Offload owns memory .* make others with"):
        copy_of(penstock.offload(tmp_path))


def test_a_capture_in_inference_mode_is_refused():
    model = Model()
    with torch.inference_mode(), pytest.raises(CaptureError, match="leave it around the capture"):
        capture(model, sgd(model.parameters()), batches()[0])
    with torch.no_grad():
        capture(model, sgd(model.parameters()), batches()[0])


def test_a_number_of_a_module_that_changes_is_warned_of_once():
    model: Any = Model()
    model.scale = 0.5
    with bound(model, sgd(model.parameters()), batches()[0], 1) as step:
        step(batches()[0])
        model.scale = 0.25
        with pytest.warns(UserWarning, match=r"model.scale is 0.25 and was 0.5") as warned:
            step(batches()[0])
        assert warned[0].filename == __file__
        step(batches()[0])


def test_shared_memory_is_refused():
    model = Model()
    with bound_as(plain(), model, sgd(model.parameters())) as step:
        step(batches()[0])
        model.first.weight.share_memory_()
        with pytest.raises(PenstockError, match="has been moved"):
            step(batches()[0])


def test_a_forked_process_is_told():
    model = Model()
    with bound_as(plain(0.5), model, sgd(model.parameters())) as step:
        step(batches()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process has threads
            child = os.fork()
        if not child:
            try:
                step(batches()[0])
            except PenstockError as error:
                os._exit(7 if "another process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_schedulers_see_the_steps():
    model = Model()
    stepper = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 1)
    with bound_as(plain(), model, stepper) as step:
        step(batches()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()
    assert scheduler.last_epoch == 1


@torch.library.custom_op("penstock_tests::noise", mutates_args=())
def _noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@_noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_noise.register_autograd(lambda ctx, gradient: gradient)


def test_operators_that_draw_and_do_not_say_so():
    def middle(model: Any, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            y = _noise(y).tanh()
        return F.dropout(y)

    assert unlike_eager(lambda: Model(middle), batches(), shares=(0.5, 0.2)) == []
