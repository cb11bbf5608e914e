"""Optimizers of one's own: state that is replaced trains as eager, what a graph cannot say is
refused by name.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

from _steps import Case, unlike_eager
from penstock.errors import CaptureError, GraphFileError

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def make_model():
    model = nn.Linear(8, 3)
    model.weight.data = model.weight.data.t().contiguous().t()  # strides of its own
    return model


CASE = Case(make_model, X, lambda output, batch: output.square().mean())


class Custom(torch.optim.Optimizer):
    """An optimizer whose update of one parameter is given."""

    def __init__(self, parameters, update, *keys):
        super().__init__(parameters, {"lr": 0.1})
        self.update = update
        for parameter in self.param_groups[0]["params"] if keys else ():
            self.state[parameter] = {key: torch.full_like(parameter, len(key)) for key in keys}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(self.state[parameter], parameter, group["lr"])


def train(update, *keys, warm_up_steps=0):
    make = lambda parameters: Custom(parameters, update, *keys)  # noqa: E731
    return unlike_eager(CASE, make, warm_up_steps=warm_up_steps)


def replaces_the_momentum(state, parameter, lr):
    state["m"] = state.get("m", torch.zeros_like(parameter)) * 0.9 + parameter.grad
    parameter.sub_(lr * state["m"])


def swaps(state, parameter, lr):
    state["m"].mul_(0.5).add_(parameter.grad)
    parameter.sub_(lr * (state["m"] + 0.3 * state["older"]))
    state["m"], state["older"] = state["older"], state["m"]


def keeps_the_gradient(state, parameter, lr):
    parameter.sub_(lr * (parameter.grad + state.get("g", torch.zeros_like(parameter))))
    state["g"] = parameter.grad


def keeps_the_parameter(state, parameter, lr):
    step = lr * parameter.grad + 0.1 * (parameter - state.get("previous", parameter))
    state["previous"] = parameter.clone()
    parameter.sub_(step)


def pops(state, parameter, lr):
    m = state.pop("m") * 0.9 + parameter.grad
    parameter.sub_(lr * m)
    state["m"], state["older"] = m, m * 2


def moves_on(state, parameter, lr):
    state["older"] = state["m"]
    state["m"] = parameter.grad + 1
    parameter.sub_(lr * state["older"])


def takes_rows(state, parameter, lr):
    both = torch.stack([state["m"] + parameter.grad, state["older"] * 0.5])
    state["m"], state["older"] = both[0], both[1]
    parameter.sub_(lr * both.sum(0))


def counts(state, parameter, lr):
    state["step"] = state.get("step", torch.zeros(())) + 1
    parameter.sub_(lr / state["step"] * parameter.grad)


@pytest.mark.parametrize("update", [swaps, pops, moves_on, replaces_the_momentum])
def test_state_made_at_the_beginning_that_is_replaced(update):
    assert train(update, "m", *(["older"] * (update is not replaces_the_momentum))) == []


def test_state_in_rows_of_a_new_tensor():
    def update(state, parameter, lr):
        if parameter.dim() == 1:  # rows have no strides of their own
            takes_rows(state, parameter, lr)
        else:
            parameter.sub_(lr * parameter.grad)

    assert train(update, "m", "older") == []


@pytest.mark.parametrize(
    "update", [replaces_the_momentum, keeps_the_gradient, keeps_the_parameter, counts]
)
def test_state_that_a_first_step_makes_and_others_replace(update):
    with pytest.raises(ValueError, match="take one ordinary step"):
        train(update)
    assert train(update, warm_up_steps=1) == []


def test_what_a_first_step_swaps_is_not_taken_for_its_beginning():
    def update(state, parameter, lr):
        if not state:
            state.update(m=torch.zeros_like(parameter), older=torch.ones_like(parameter))
        swaps(state, parameter, lr)

    with pytest.raises(ValueError, match="take one ordinary step"):
        train(update)
    assert train(update, warm_up_steps=2) == []


def makes_a_second_key(state, parameter, lr):
    state["b" if "a" in state else "a"] = torch.zeros_like(parameter)
    parameter.sub_(lr * parameter.grad)


def removes(state, parameter, lr):
    parameter.sub_(lr * state.pop("m", 0) * parameter.grad)


def changes_the_form(state, parameter, lr):
    state["m"] = state["m"].sum()
    parameter.sub_(lr * state["m"])


def shares_the_parameter(state, parameter, lr):
    parameter.sub_(lr * state["m"])
    state["m"] = parameter.detach()


def shares_other_state(state, parameter, lr):
    parameter.sub_(lr * state["m"])
    state["m"] = state["older"]


def appends(state, parameter, lr):
    state["all"] = [*state.get("all", [])[-1:], parameter.grad.clone()]
    parameter.sub_(lr * sum(state["all"]))


@pytest.mark.parametrize(
    ("update", "keys", "message"),
    [
        (makes_a_second_key, (), r"makes optimizer\.state\.weight\.b, .* until the state stays"),
        (removes, ("m", "n"), r"removes optimizer\.state\.weight\.m"),
        (changes_the_form, ("m",), r"lets optimizer\.state\.weight\.m become .* shape \(\) .* was"),
        (shares_the_parameter, ("m",), r"weight\.m be the memory of a parameter.*clone\(\)"),
        (shares_other_state, ("m", "older"), r"\.older be the memory of another tensor of the"),
        (appends, ("m",), r"changes optimizer\.state\.weight\.all, .* under its own key"),
    ],
)
def test_state_that_a_graph_cannot_keep_is_refused(update, keys, message):
    with pytest.raises(CaptureError, match=message):
        train(update, *keys, warm_up_steps=int(update is appends))


def test_buffers_that_are_swapped():
    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("a", torch.zeros(8))
            self.register_buffer("b", torch.ones(8))

        def forward(self, x):
            y = self.layer(x) + self.a
            self.a.add_(y.detach().mean(0))
            self.a, self.b = self.b, self.a
            return y.square().mean()

    assert unlike_eager(Case(Swaps, X), lambda each: torch.optim.SGD(each, lr=0.1)) == []


class Wrapper(torch.optim.Optimizer):
    """Steps by other optimizers, as averages and look-aheads do."""

    def __init__(self, inner, hold):
        super().__init__(inner.param_groups, {})
        self.inner = hold(inner)

    def step(self, closure=None):
        self.inner() if callable(self.inner) else self.inner.step()


@pytest.mark.parametrize("hold", [lambda each: each, lambda each: [each], lambda each: {"a": each}])
def test_an_optimizer_that_holds_another_is_refused(hold):
    make = lambda parameters: Wrapper(torch.optim.SGD(parameters, 0.1), hold)  # noqa: E731
    with pytest.raises(CaptureError, match=r"of class SGD \(optimizer\.inner\).*pass that one"):
        unlike_eager(CASE, make)


def test_an_optimizer_that_changes_other_tensors_is_refused():
    make = lambda parameters: Wrapper(  # noqa: E731
        torch.optim.SGD(parameters, 0.1), lambda inner: lambda: inner.step()
    )
    with pytest.raises(CaptureError, match=r"changes none of its parameters, of which 2 have"):
        unlike_eager(CASE, make)
    frozen = lambda parameters: torch.optim.SGD(list(parameters)[:1], 0.0)  # noqa: E731
    assert unlike_eager(CASE, frozen) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda each: torch.optim.SGD(each, lr=torch.tensor(0.1), momentum=0.9, fused=True),
        lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.1), fused=True),
    ],
)
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_learning_rates_that_are_tensors_of_fused_optimizers(make, is_scheduled):
    def with_schedule(parameters):
        optimizer = make(parameters)
        if is_scheduled:  # which adds another tensor to the groups
            torch.optim.lr_scheduler.LinearLR(optimizer)
        return optimizer

    def lower(optimizer, step):
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(0.05) if step == 1 else group["lr"].mul_(0.5)

    assert unlike_eager(CASE, with_schedule, before_step=lower) == []


class Attributes(Custom):
    """Calls `update` with itself, before it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        scale = self.update(self, self.param_groups[0])
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(scale * parameter.grad)


def counts_in_the_group(optimizer, group):
    group.setdefault("t", torch.zeros(())).add_(1)
    return 0.1 / group["t"]


def replaces_in_the_group(optimizer, group):
    group["t"] = group["t"] + 1
    return 0.1 / group["t"]


def replaces_an_attribute(optimizer, group):
    optimizer.rate = optimizer.rate * 0.9
    return optimizer.rate


def replaces_in_an_attribute(optimizer, group):
    optimizer.rates["now"] = optimizer.rates["now"] * 0.9
    return optimizer.rates["now"]


def makes_an_attribute(optimizer, group):
    optimizer.last = group["params"][0].grad.norm()
    return 0.1


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (counts_in_the_group, "adds 't' to optimizer.param_groups, .* state of a parameter"),
        (replaces_in_the_group, r"changes optimizer\.param_groups\[0\]\['t'\], "),
        (replaces_an_attribute, r"changes optimizer\.rate, "),
        (replaces_in_an_attribute, r"changes optimizer\.rates, "),
        (makes_an_attribute, r"makes optimizer\.last, .* or take one ordinary step"),
    ],
)
def test_tensors_beside_the_state_that_a_step_makes_or_replaces_are_refused(update, message):
    def make(parameters):
        optimizer = Attributes(parameters, update, "m")
        optimizer.rate, optimizer.rates = torch.ones(()), {"now": torch.ones(())}
        if update is replaces_in_the_group:
            optimizer.param_groups[0]["t"] = torch.ones(())
        return optimizer

    with pytest.raises(CaptureError, match=message):
        unlike_eager(CASE, make)


@pytest.mark.parametrize("keys", [(), ("m",)])
def test_what_a_step_only_notes_is_no_state(keys):
    make = lambda parameters: Attributes(parameters, makes_an_attribute, *keys)  # noqa: E731
    assert unlike_eager(CASE, make, warm_up_steps=1) == []
    if not keys:
        assert unlike_eager(CASE, make) == []


CHANGES = {
    "optimizer.param_groups.0.etas.1": lambda each: each.param_groups[0].update(etas=(0.5, 1.1)),
    "optimizer.param_groups.0.rho": lambda each: each.param_groups[0].update(rho=np.float32(0.5)),
    "optimizer.rate": lambda each: setattr(each, "rate", 0.05),
    "optimizer.rates.now.0": lambda each: each.rates["now"].reverse(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_of_groups_and_attributes_that_change_between_steps_are_refused(name):
    def update(optimizer, group):
        group_rate = group["etas"][1] * float(group["rho"])
        return group_rate * optimizer.rate * optimizer.rates["now"][0]

    def make(parameters):
        optimizer = Attributes(parameters, update, "m")
        optimizer.param_groups[0].update(etas=(0.5, 1.2), rho=np.float32(0.1))
        optimizer.rate, optimizer.rates = 0.1, {"now": [1.0, 2.0]}
        return optimizer

    def change(optimizer, step):
        if step == 1:
            CHANGES[name](optimizer)

    assert unlike_eager(CASE, make) == []
    with pytest.raises(GraphFileError, match=f"^{re.escape(name)} is .* at the capture"):
        unlike_eager(CASE, make, before_step=change)


def test_flags_that_the_first_step_sets_are_no_matter():
    def update(optimizer, group):
        optimizer.is_ready = True
        return 0.1

    def make(parameters):
        optimizer = Attributes(parameters, update)
        optimizer.is_ready = False
        return optimizer

    def change(optimizer, step):
        optimizer.is_ready = True

    assert unlike_eager(CASE, make, before_step=change) == []


@pytest.mark.parametrize(("at_first", "error"), [(True, CaptureError), (False, GraphFileError)])
def test_rates_that_round_what_is_calculated_with_them_are_refused(at_first, error):
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=np.float32(0.01) if at_first else 0.01)

    def change(optimizer, step):
        optimizer.param_groups[0]["lr"] = np.float32(0.001)

    with pytest.raises(error, match=r"lr is np\.float32\(0\.\d+\), .* pass float\("):
        unlike_eager(CASE, make, before_step=change)


def frees_the_gradient(state, parameter, lr):
    if not state:
        state["m"] = torch.zeros_like(parameter)
    state["m"].mul_(0.5).add_(parameter.grad)
    parameter.sub_(lr * state["m"])
    parameter.grad = None


@pytest.mark.parametrize("warm_up_steps", [0, 1])
def test_gradients_that_a_step_frees(warm_up_steps):
    assert train(frees_the_gradient, warm_up_steps=warm_up_steps) == []


@pytest.mark.parametrize("warm_up_steps", [0, 1])
def test_state_of_no_parameter_is_refused(warm_up_steps):
    def update(optimizer, group):
        optimizer.state["all"].setdefault("t", torch.zeros(())).add_(1)
        return 0.1

    make = lambda parameters: Attributes(parameters, update)  # noqa: E731
    with pytest.raises(CaptureError, match=r"keeps state under 'all' .* under one of them"):
        unlike_eager(CASE, make, warm_up_steps=warm_up_steps)
