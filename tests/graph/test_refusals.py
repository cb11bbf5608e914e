"""Programs that cannot be captured are refused with the line that is the reason."""

import functools
import math
import random
import re
import secrets
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.errors import CaptureError
from penstock.graph import capture


class Step(nn.Module):
    """A model whose forward pass is given."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._forward = forward

    def forward(self, x):
        return self._forward(self.weight, x)


def branches(weight, x):
    if (weight * x).sum() > 0:  # refused
        return weight.sum()
    return (weight * 2).sum()


def takes_an_item(weight, x):
    scale = x.max().item()  # refused
    return (weight * scale).sum()


def selects_by_mask(weight, x):
    return weight[x > 0].sum()  # refused


def finds_nonzeros(weight, x):
    return weight.sum() * x.nonzero().sum()  # refused


def uses_a_big_constant(weight, x):
    return (weight * BIG).sum()  # refused


def changes_storage(weight, x):
    return weight.sum() + x.clone().resize_(2).sum()  # refused


def uses_a_generator(weight, x):
    return (weight * torch.rand(4, generator=torch.default_generator)).sum()  # refused


def draws_with_numpy(weight, x):
    return weight.sum() * float(numpy.random.rand())  # noqa: NPY002  # refused


def draws_from_the_system(weight, x):
    return weight.sum() * (1 if random.SystemRandom().random() < 2 else 2)  # refused


def makes_a_generator(weight, x):
    return weight.sum() * (1 if random.Random().random() < 2 else 2)  # refused


def draws_a_secret(weight, x):
    return weight.sum() * (1 if secrets.randbelow(3) < 5 else 2)  # refused


def draws_with_python(weight, x):
    return weight.sum() * random.gauss(0.0, 1.0)  # refused


BIG = torch.ones(20_000, 4)


@pytest.mark.parametrize(
    "forward",
    [
        *(branches, takes_an_item, selects_by_mask, finds_nonzeros),
        *(uses_a_big_constant, changes_storage, uses_a_generator),
        *(draws_with_python, draws_with_numpy, draws_from_the_system, draws_a_secret),
        makes_a_generator,
    ],
)
def test_the_line_is_named(forward):
    model = Step(forward)
    optimizer = torch.optim.SGD(model.parameters())
    lines = Path(__file__).read_text().splitlines()
    start = lines.index(f"def {forward.__name__}(weight, x):")
    number = next(i for i in range(start, len(lines)) if lines[i].endswith("# refused")) + 1
    where = re.escape(f"{__file__}:{number}, in {forward.__name__}")
    with pytest.raises(CaptureError, match=where):
        capture(model, optimizer, torch.ones(4))


def test_random_numbers_of_python_are_refused_and_not_used_up():
    model = Step(lambda weight, x: weight.sum() * random.random())
    before = random.getstate()
    with pytest.raises(CaptureError, match="random module"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    assert random.getstate() == before


def seeds(weight, x):
    torch.manual_seed(3)
    return (weight * torch.rand(4)).sum()


@pytest.mark.parametrize(
    ("forward", "message"),
    [(draws_with_numpy, "NumPy's global generator"), (seeds, "torch's generator")],
)
def test_other_random_numbers_are_refused_and_not_used_up(forward, message):
    model = Step(forward)
    before = numpy.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    assert (numpy.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])


class Remembers(nn.Module):
    """Keeps what should be a buffer as a plain attribute."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.alias = self.weight.detach()
        self.center, self.count, self.seen = torch.zeros(4), 0, {}
        self.how = how

    def forward(self, x):
        self.how(self, x)
        return (self.weight * x - self.center).square().sum()


def assigns_a_tensor(model, x):
    model.center = model.center * 0.9 + x.detach()  # refused


def changes_a_tensor(model, x):
    model.center.mul_(0.9)


def counts(model, x):
    model.count += 1  # refused


def looks_past_the_model(model, x):
    x.add(model.alias)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (assigns_a_tensor, "changes the attribute 'center' of 'model'"),
        (changes_a_tensor, "is changed in place that was there before the step"),
        (counts, "changes the attribute 'count' of 'model'"),
        (looks_past_the_model, "past the model"),
    ],
)
def test_state_that_is_no_buffer_is_refused(how, message):
    model = Remembers(how)
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    assert (model.center.tolist(), model.count) == ([0] * 4, 0)


@pytest.mark.parametrize("how", [assigns_a_tensor, counts])
def test_the_line_that_changes_an_attribute_is_named(how):
    model = Remembers(how)
    lines = Path(__file__).read_text().splitlines()
    number = lines.index(f"def {how.__name__}(model, x):") + 2
    with pytest.raises(CaptureError, match=re.escape(f"{__file__}:{number}, in {how.__name__}")):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_an_optimizer_that_is_refused_is_refused_at_the_users_line():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(CaptureError, match=re.escape(f"{__file__}:")):
        capture(model, optimizer, torch.ones(4), loss=lambda output, batch: output.sum())


def test_experts_that_torch_cannot_capture_name_the_way_out():
    """As Mixtral's do in float32: torch refuses the product on tensors without data."""

    def forward(weight, x):
        offsets = torch.tensor([4, 8], dtype=torch.int32)
        return torch._grouped_mm(weight.expand(8, 4), x.expand(2, 4, 4), offs=offsets).sum()

    model = Step(forward)
    with pytest.raises(CaptureError, match='experts_implementation="batched_mm"'):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_containers_of_the_model_are_as_before():
    model = Remembers(lambda model, x: model.seen.update(x=x))
    capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    assert model.seen == {}


def looks_at_the_data(weight, x):
    return weight.sum() * float(x.numpy().sum())  # refused


def fits_badly(weight, x):
    return (weight @ x[:3]).sum()  # refused


@pytest.mark.parametrize(
    ("forward", "remedy"),
    [
        (looks_at_the_data, r"not supported .*; calculate with torch instead"),
        (fits_badly, ""),
    ],
)
def test_torchs_own_errors_name_the_line(forward, remedy):
    model = Step(forward)
    message = rf"in {forward.__name__}: return .* torch cannot run.*{remedy}"
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_control_flow_of_torch_is_refused_at_the_users_line():
    """Else torch ends the process."""

    def forward(weight, x):
        return torch.cond(x.sum() > 0, torch.sum, torch.mean, (weight,))  # refused

    model = Step(forward)
    with pytest.raises(CaptureError, match=r"in forward: .* torch's cond lets .* torch\.where"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_torchs_own_errors_without_a_line_of_the_model_name_that_of_the_capture():
    model = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(CaptureError, match=rf"{re.escape(__file__)}:.* torch cannot run"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(2, 3))


def test_checks_of_distributions_name_the_way_out():
    normal = functools.partial(torch.distributions.Normal, scale=1.0, validate_args=True)
    model = Step(lambda weight, x: normal(weight).log_prob(x).sum())
    with pytest.raises(CaptureError, match="validate_args=False"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_the_detection_of_anomalies_is_named():
    model = Step(lambda weight, x: (weight * x).sum())
    optimizer = torch.optim.SGD(model.parameters())
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(CaptureError, match=r"set_detect_anomaly\(True\).*check_nan=False"):
            capture(model, optimizer, torch.ones(4))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        capture(model, optimizer, torch.ones(4))


def in_place(module):
    module.compile()
    return module


@pytest.mark.parametrize("how", [torch.compile, torch.jit.script, in_place])
def test_compiled_parts_are_refused(how):
    model = nn.Sequential(nn.Linear(4, 4), how(nn.Linear(4, 1)))
    with pytest.raises(CaptureError, match="1 is compiled"):
        capture(
            model,
            torch.optim.SGD(model.parameters()),
            torch.ones(4),
            loss=lambda output, batch: output.sum(),
        )


def test_captures_in_threads_take_turns():
    def one(number):
        model = Step(total)
        return capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))

    with ThreadPoolExecutor(4) as threads:
        graphs = list(threads.map(one, range(8)))
    assert all(graph == graphs[0] for graph in graphs)


def total(weight, x):
    return (weight * x).sum()


class RootOfTheRate(torch.optim.SGD):
    """Steps by the root of the learning rate, by way of a float."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-math.sqrt(group["lr"]))


class CountsInPython(torch.optim.SGD):
    """Keeps a Python number in its state."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.data.add_(parameter.grad, alpha=-0.1)


class CountsItsSteps(torch.optim.SGD):
    """Counts steps in a number of its own, and does something else at every third."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count, self.counts, self.flag = 0, {"steps": 0}, True
        self.param_groups[0]["steps"] = 0

    def step(self, closure=None):
        self.flag = False  # no number: allowed
        self.add_one()
        super().step()
        if (self.count + self.counts["steps"] + self.param_groups[0]["steps"]) % 3 == 0:
            self.param_groups[0]["params"][0].data.mul_(0.5)

    def add_one(self):
        self.count += 1


class CountsInADictionary(CountsItsSteps):
    def add_one(self):
        self.counts["steps"] += 1


class CountsInItsGroup(CountsItsSteps):
    def add_one(self):
        self.param_groups[0]["steps"] += 1


class LowersItsRate(CountsItsSteps):
    def add_one(self):
        self.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "closure"),
        (CountsItsSteps, r"step changes optimizer\.count, "),
        (CountsInADictionary, r"step changes optimizer\.counts, "),
        (CountsInItsGroup, r"step changes optimizer\.param_groups\[0\]\['steps'\], "),
        (LowersItsRate, r"step changes optimizer\.param_groups\[0\]\['lr'\], "),
        (lambda parameters: torch.optim.RAdam(parameters), "branches on a step count"),
        (RootOfTheRate, "plain Python number"),
        (CountsInPython, "Python numbers in its state"),
        (lambda parameters: torch.optim.SGD([nn.Parameter(torch.ones(2))]), "no parameter of the"),
    ],
)
def test_optimizers_whose_steps_differ_are_refused(make, message):
    model = Step(total)
    optimizer = make(model.parameters())
    before = {**vars(optimizer), "counts": dict(getattr(optimizer, "counts", {}))}
    with pytest.raises(CaptureError, match=message):
        capture(model, optimizer, torch.ones(4))
    assert {**before, **vars(optimizer)} == before  # as it was


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (torch.optim.Adafactor, "Adafactor cannot be captured.*use one whose steps are alike"),
        (torch.optim.ASGD, "ASGD cannot be captured.*penstock.offload"),
        (torch.optim.RAdam, "RAdam cannot be captured.*penstock.offload"),
        (
            lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
            r"AdamW cannot be captured.*\[0\]\['lr'\] is a tensor: make it a Python number",
        ),
    ],
)
def test_optimizers_are_refused_by_name_with_the_way_out(make, way):
    model = Step(total)
    with pytest.raises(CaptureError, match=way):
        capture(model, make(model.parameters()), torch.ones(4))


def test_a_scaler_of_gradients_is_refused_by_name():
    model = Step(total)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    model.weight.grad = torch.ones(4)
    with pytest.raises(CaptureError, match=r"GradScaler .* train in bfloat16"):
        capture(model, optimizer, torch.ones(4), before_step=lambda: scaler.unscale_(optimizer))


def test_ctc_is_refused_by_name():
    class Ctc(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x, targets, lengths, target_lengths):
            scores = self.layer(x).log_softmax(-1)
            return nn.functional.ctc_loss(scores, targets, lengths, target_lengths)

    model = Ctc()
    lengths = torch.tensor([10, 9, 8]), torch.tensor([4, 3, 2])
    batch = (torch.randn(10, 3, 8), torch.randint(1, 6, (3, 4)), *lengths)
    with pytest.raises(CaptureError, match=r"ctc_loss.*under penstock.offload"):
        capture(model, torch.optim.SGD(model.parameters()), batch)


def test_complex_parameters_are_refused_with_the_way_out():
    model = Step(total)
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.cfloat))
    with pytest.raises(CaptureError, match="view_as_real"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_hooks_on_gradients_are_refused():
    model = Step(total)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match="'weight' has hooks"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_on_the_accumulation_of_gradients_are_refused(register):
    model = Step(total)
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    handle = getattr(node, register)(lambda *_: None)
    with pytest.raises(CaptureError, match="'weight' has hooks"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    handle.remove()
    capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_a_batch_in_the_memory_of_a_parameter_is_refused():
    model = Step(total)
    batch = model.weight.detach()
    with pytest.raises(CaptureError, match=r"batch lies in the memory of 'model\.weight'"):
        capture(model, torch.optim.SGD(model.parameters()), batch)
    capture(model, torch.optim.SGD(model.parameters()), batch.clone())


def test_a_batch_beside_a_parameter_or_in_a_buffer_that_stays_is_none():
    memory = torch.ones(8)
    model = Step(total)
    model.weight = nn.Parameter(memory[:4])
    model.register_buffer("mean", torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters())
    capture(model, optimizer, memory[4:])
    capture(model, optimizer, model.mean)


def draws_an_id(weight, x):
    return weight.sum() if uuid.uuid4() else x.sum()


def test_ids_are_no_random_numbers():
    model = Step(draws_an_id)
    capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_hooks_around_the_optimizer_are_refused():
    model = Step(total)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks around step"):
        capture(model, optimizer, torch.ones(4))


def test_hooks_around_all_optimizers_are_refused():
    model = Step(total)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="of all optimizers, which run Python"):
            capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    finally:
        handle.remove()


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_step_in_place_of_the_optimizers_is_refused(is_scheduled):
    model = Step(total)
    optimizer = torch.optim.SGD(model.parameters())
    if is_scheduled:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        capture(model, optimizer, torch.ones(4))  # what schedulers put there only counts
    step = optimizer.step

    def with_signs():
        model.weight.grad.sign_()
        step()

    optimizer.step = with_signs
    with pytest.raises(CaptureError, match="this SGD has a step of its own"):
        capture(model, optimizer, torch.ones(4))


class MakesState(nn.Module):
    """Reads what its last call has left; a buffer or parameter that it makes in its first call."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(4)), kind
        if kind == "empty":
            self.register_buffer("last", None)

    def forward(self, x):
        if getattr(self, "last", None) is None:
            made = torch.zeros(4)
            if self.kind == "parameter":
                self.last = nn.Parameter(made)
            else:
                self.register_buffer("last", made)
        result = self.weight * x + self.last
        if self.kind != "parameter":
            self.last.copy_(result.detach())
        return result.sum()


@pytest.mark.parametrize("kind", ["empty", "missing", "parameter"])
def test_state_that_the_first_call_makes_is_refused(kind):
    model = MakesState(kind)
    message = "'last' of 'model', which planned steps would not: call the model once before"
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))
    assert getattr(model, "last", None) is None
    model(torch.ones(4))
    capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_lazy_parameters_are_refused_with_the_way_out():
    model = nn.LazyLinear(1, bias=False)
    with pytest.raises(CaptureError, match="'weight' gets its shape in the first call"):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(1, 4))


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(CaptureError, match="sparse=False"):
        capture(
            model,
            torch.optim.SGD(model.parameters()),
            torch.tensor([1]),
            loss=lambda output, batch: output.sum(),
        )


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (lambda weight, x: weight, TypeError, "one element"),
        (lambda weight, x: x.sum(), CaptureError, "depends on no parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused(forward, error, message):
    model = Step(forward)
    with pytest.raises(error, match=message):
        capture(model, torch.optim.SGD(model.parameters()), torch.ones(4))


def test_arguments_of_the_wrong_type_are_named():
    with pytest.raises(TypeError, match="model has to be"):
        capture(None, None, None)
    with pytest.raises(TypeError, match="optimizer has to be"):
        capture(nn.Linear(2, 2), None, None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for argument in ("loss", "before_step"):
        with pytest.raises(TypeError, match=f"{argument}=3: pass a function"):
            capture(model, optimizer, None, **{argument: 3})
    with pytest.raises(ValueError, match="accumulate='2'"):
        capture(model, optimizer, [None, None], accumulate="2")
