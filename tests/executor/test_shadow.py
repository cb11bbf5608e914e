"""Steps that are compared with the program itself: what a graph cannot see is noticed."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import penstock
from _planned import MACHINE, differences, everything
from penstock.errors import CaptureError, UnlikeEagerError
from penstock.graph import StepGraph

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"machine": MACHINE, "time_limit": 0.05, "cache": False}
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Dropout, running statistics, a buffer that is replaced, and a program of one's own."""

    def __init__(self, scale):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 32)
        )
        self.register_buffer("mean", torch.zeros(32))
        self.seen = []
        self._scale = scale

    def forward(self, x):
        y = self.layers(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return (y - self.mean).square().mean() * self._scale()


def trainee(scale=lambda: 1.0, **options):
    torch.manual_seed(0)
    model = Model(scale)
    optimizer = torch.optim.AdamW(model.parameters())
    step = penstock.fit(
        model,
        optimizer,
        X,
        device_memory=options.pop("device_memory", "64MiB"),
        **{**OPTIONS, **options},
    )
    return model, optimizer, step


def test_a_number_that_changes_later_is_noticed_at_once():
    scale = [1.0]
    model, optimizer, step = trainee(lambda: scale[0])
    losses = [step(X) for _ in range(2)]
    scale[0] = 0.5
    before = everything(model, optimizer, losses)
    for _ in range(5):  # it is no less another step the second time
        with pytest.raises(CaptureError, match=r"is 0\.5 and was 1\.0"):
            step(X)
    assert not differences(before, everything(model, optimizer, losses), "")
    scale[0] = 1.0
    step(X)


def test_numbers_are_those_of_the_model_that_is_bound():
    """A graph may be of another instance, as one on the meta device."""
    with torch.device("meta"):
        other = Model(lambda: 1.0)
    graph = penstock.capture(other, torch.optim.SGD(other.parameters()), X)
    graph = copy.deepcopy(graph)
    model = Model(lambda: 1.0)
    optimizer = torch.optim.SGD(model.parameters())
    found = penstock.plan(graph, machine=MACHINE, time_limit=0.05)
    with penstock.bind(found, model, optimizer, graph=graph) as step:
        for _ in range(2):
            step(X)
        other.layers[1].momentum = 0.5
        step(X)
        model.layers[1].momentum = 0.5  # which changes no loss
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"is 0\.5 and was 0\.1"):
                step(X)
    assert pickle.loads(pickle.dumps(graph)).captured is None  # whose functions are not there


RATE = {"now": 0.1}


class Descent(torch.optim.Optimizer):
    scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * RATE["now"] * self.scale)


@pytest.mark.parametrize("name", [r"RATE\['now'\]", r"Descent\.scale"])
def test_what_the_step_of_an_optimizer_reads_elsewhere_is_warned_of(name, monkeypatch):
    model = Model(lambda: 1.0)
    optimizer = Descent(model.parameters(), {})
    with penstock.fit(model, optimizer, X, device_memory="64MiB", **OPTIONS) as step:
        step(X)
        if "RATE" in name:
            monkeypatch.setitem(RATE, "now", 0.5)
        else:
            monkeypatch.setattr(Descent, "scale", 0.5)
        with pytest.warns(UserWarning, match=rf"^{name} .* is 0\.5 and was .* optimizer's step"):
            step(X)
        step(X)  # warnings are errors in tests


def test_a_number_of_the_backward_pass_is_noticed_at_once():
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.model.factor * gradient, None

    model = nn.Sequential(nn.Linear(X.shape[1], 8))
    model.factor = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda output, batch: Reversed.apply(output, model).square().mean()  # noqa: E731
    step = penstock.fit(model, optimizer, X, loss=loss, device_memory="64MiB", **OPTIONS)
    for _ in range(10):
        step(X)
    model.factor = 0.25
    with pytest.raises(CaptureError, match=r"in backward: .* is -0\.25 and was -1\.0"):
        step(X)


def test_a_number_without_an_effect_costs_few_captures():
    position = [0] * 200
    *_, step = trainee(lambda: 1.0 if sum(position) < 1000 else 2.0)
    for number in range(1, 65):
        position[number] += 1
        step(X)
    assert 4 <= step.report().num_captures_again <= 2 * 7


def test_a_change_that_sets_in_late_is_noticed_at_a_power_of_two():
    """Of the backward pass, which no comparison of losses would show."""

    class Scaled(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1.0 if epoch["number"] < 21 else 0.5)

    epoch = {"number": 0}
    model = nn.Sequential(nn.Linear(X.shape[1], 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda output, batch: Scaled.apply(output).square().mean()  # noqa: E731
    step = penstock.fit(model, optimizer, X, loss=loss, device_memory="64MiB", **OPTIONS)
    for number in range(32):
        epoch["number"] = number
        step(X)
    epoch["number"] = 32
    with pytest.raises(CaptureError, match=r"is 0\.5"):
        step(X)


def test_what_cannot_be_checked_is_warned_of(tmp_path):
    scale = [1.0]
    torch.manual_seed(0)
    model = Model(lambda: scale[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penstock.capture(model, optimizer, X).save(tmp_path / "graph")
    graph = StepGraph.load(tmp_path / "graph")
    found = penstock.plan(graph, machine=MACHINE, time_limit=0.05)
    step = penstock.bind(found, model, optimizer, graph=graph)
    step(X)
    scale[0] = 0.5
    with pytest.warns(UserWarning, match=r"scale\[0\] changed since .* not captured in this"):
        step(X)


def test_a_number_that_changes_is_warned_of_where_nothing_is_checked():
    scale = [1.0]
    *_, step = trainee(lambda: scale[0], shadow=0)
    step(X)
    scale[0] = 0.5
    with pytest.warns(UserWarning, match=r"scale\[0\] changed since .* shadow=0"):
        step(X)


def test_a_counter_that_matters_later_is_noticed():
    def count():
        number = 0
        while True:
            number += 1
            yield number

    calls = count()  # a generator's own variables are not looked at
    *_, step = trainee(lambda: 1.0 if next(calls) < 4 else 0.5)  # calls it twice
    step(X)
    with pytest.raises((CaptureError, UnlikeEagerError)):
        step(X)


def test_losses_are_compared(monkeypatch):
    held = [1.0]

    def loss_of(output, batch):
        return output * held[0]

    torch.manual_seed(0)
    model = Model(lambda: 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"device_memory": "64MiB", "shadow": 1, "loss": loss_of}
    step = penstock.fit(model, optimizer, X, **arguments, **OPTIONS)
    monkeypatch.setattr("penstock.executor.run.shadow.verify_again", lambda *_: None)
    losses = [step(X)]
    before = everything(model, optimizer, losses)
    held[0] = 2.0
    with pytest.raises(UnlikeEagerError, match=r"step 2: the planned loss is [\d.]+ and") as caught:
        step(X)
    assert caught.value.expected == pytest.approx(2 * caught.value.loss)
    assert not differences(before, everything(model, optimizer, losses), "")


class Classifier(nn.Module):
    """A product with many columns, and a loss that a number of Python scales."""

    def __init__(self, scale):
        super().__init__()
        self.head = nn.Linear(64, 3000, bias=False)
        self._scale = scale

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(x), labels) * self._scale()


def test_losses_of_products_in_slices_may_differ_by_rounding(monkeypatch):
    monkeypatch.setattr("penstock.executor.run.shadow.verify_again", lambda *_: None)
    batch = {"x": torch.randn(700, 64), "labels": torch.randint(0, 3000, (700,))}
    found = []
    slices = {"device_memory": "6MiB", "host_memory": "1GiB", "split_products": True}
    for options, too_much in (({"device_memory": "64MiB"}, 1e-6), (slices, 1e-4)):
        torch.manual_seed(0)
        scale = [1.0]
        model = Classifier(lambda held=scale: held[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = penstock.fit(model, optimizer, batch, shadow=1, **options, **OPTIONS)
        losses = [float(step(batch)) for _ in range(3)]
        scale[0] = 1 + too_much / 100
        losses.append(float(step(batch)))
        assert step.report().num_shadow_steps == 4
        found.append(losses)
        scale[0] = 1 + too_much
        with pytest.raises(UnlikeEagerError, match="step 5"):
            step(batch)
    assert step.plan.splits_products and step.plan.peak_device_bytes < 700 * 3000 * 4
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("options", [{"shadow": 1}, {"shadow": 0}, {}])
def test_checks_change_nothing(options, store):
    assert not differences(unchecked(store.parent), five_steps(store, **options), "")


def five_steps(store, **options):
    model, optimizer, step = trainee(device_memory="48KiB", store=store, **options)
    torch.manual_seed(1)
    return everything(model, optimizer, [step(X) for _ in range(5)])


@functools.cache
def unchecked(store):
    return five_steps(store, shadow=0)


def test_the_report_counts_checks():
    counts = {}
    for every in (None, 0, 1, 3):
        *_, step = trainee(shadow=every)
        for _ in range(9):
            step(X)
        report = step.report()
        counts[every] = report.num_shadow_steps
        assert (report.shadow_seconds > 0) is (every != 0)
    assert counts == {None: 4, 0: 0, 1: 9, 3: 4}


def test_an_eager_call_that_the_budget_has_no_room_for_is_left_out(monkeypatch):
    monkeypatch.setattr("penstock.executor.run.shadow._SMALL_BYTES", 0)
    *_, step = trainee(device_memory="48KiB", host_memory="1MiB")
    for _ in range(2):
        step(X)
    report = step.report()
    assert report.num_shadow_steps == 0
    assert report.num_captures_again == 1
    assert "the budget leaves" in report.shadow_left_out


def test_losses_that_differ_from_call_to_call_cannot_be_compared(monkeypatch):
    eager = iter([0.25, 0.5])
    monkeypatch.setattr(
        "penstock.executor.run.shadow._compute_loss", lambda *_: torch.tensor(next(eager, 0.0))
    )
    *_, step = trainee()
    with pytest.warns(UserWarning, match="two eager calls of the same step") as warned:
        step(X)
    assert warned[0].filename == __file__
    assert step.report().num_shadow_steps == 0


def test_programs_that_ask_for_gradients_are_called_too():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 1)

        def forward(self, x):
            x = x.clone().requires_grad_()
            y = self.layer(x).tanh().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            return y + gradient.square().sum()

    torch.manual_seed(0)
    model = Penalty()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = penstock.fit(model, optimizer, X, device_memory="64MiB", **OPTIONS)
    step(X)
    assert step.report().num_shadow_steps == 1


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_other_distances_are_refused(every):
    with pytest.raises(ValueError, match="shadow="):
        trainee(shadow=every)


class BoundedRows(nn.Module):
    """An embedding that shortens its rows as it looks them up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(32, 16, max_norm=1.0)

    def forward(self, x):
        return self.layer(x.argsort(-1)).square().mean()


class BoundedWeight(nn.Module):
    """A layer whose weight is made smaller before it is used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return self.layer(x).square().mean()


class Teacher(nn.Module):
    """A frozen layer that follows the trained one by a moving average."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.average = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (self.layer(x) - self.average(x)).square().mean()


@pytest.mark.parametrize("kind", [BoundedRows, BoundedWeight, Teacher])
def test_parameters_that_the_forward_pass_changes_are_changed_once(kind):
    torch.manual_seed(0)
    model, eager = kind(), kind()
    eager.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager))
    step = penstock.fit(model, optimizer, X, device_memory="64MiB", **OPTIONS)
    for _ in range(5):
        loss = step(X)
        other.zero_grad()
        expected = eager(X)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
        for name, tensor in eager.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    assert step.report().num_shadow_steps == 3
