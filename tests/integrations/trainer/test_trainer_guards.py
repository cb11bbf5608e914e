"""Parts of a trainer's program that planned steps would not run are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import torch
import transformers

from _trainers import SMALL, assert_same, outcome_of, trainer_of
from penstock.errors import CaptureError, GraphFileError
from penstock.integrations.transformers import plan_training

pytestmark = pytest.mark.usefixtures("one_thread")


class WithOwnStep(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        model: Any = self.model
        for parameter in model.parameters():
            parameter.grad.mul_(0.1)
        return loss


class WithOwnClipping(transformers.Trainer):
    def _clip_grad_norm(self, model: Any) -> Any:
        norm: Any = super()._clip_grad_norm(model)
        return norm * 2


class ByStep(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss * (1.0 if self.state.global_step < 2 else 0.0)


class ByControl(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss * 2 if self.control.should_log else loss


class Keeping(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.num_losses = getattr(self, "num_losses", 0) + 1
        return super().compute_loss(*args, **kwargs)


class Listing(transformers.Trainer):
    metrics: dict[str, list[int]]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.metrics["calls"].append(1)
        return super().compute_loss(*args, **kwargs)


class Weighted(transformers.Trainer):
    weight = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss * self.weight


class ByCallback(transformers.TrainerCallback):
    """Changes the trainer's weight after its second step."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.change()


def callback_with(event: str) -> transformers.TrainerCallback:
    return type("Looking", (transformers.TrainerCallback,), {event: lambda *_, **__: None})()


def plan(trainer: transformers.Trainer) -> transformers.Trainer:
    plan_training(trainer, **SMALL)
    return trainer


@pytest.mark.parametrize(
    ("kind", "name"),
    [(WithOwnStep, r"WithOwnStep\.training_step"), (WithOwnClipping, r"_clip_grad_norm")],
)
def test_overridden_methods_of_an_update_are_refused_before_training(tmp_path, kind, name):
    trainer = plan(trainer_of(tmp_path, kind=kind))
    with pytest.raises(ValueError, match=name):
        trainer.train()
    assert trainer.state.global_step == 0
    assert "training_step" not in vars(trainer)


def test_a_replaced_method_of_an_instance_is_refused(tmp_path):
    trainer = plan(trainer_of(tmp_path))
    trainer.training_step = trainer.training_step
    with pytest.raises(ValueError, match="training_step is not Trainer's own"):
        trainer.train()


@pytest.mark.parametrize(
    ("event", "options"),
    [
        ("on_pre_optimizer_step", {}),
        ("on_optimizer_step", {}),
        ("on_substep_end", {"gradient_accumulation_steps": 2}),
    ],
)
def test_callbacks_that_look_at_gradients_are_refused_before_training(tmp_path, event, options):
    trainer = trainer_of(tmp_path, num_samples=16, **options)
    trainer.add_callback(callback_with(event))
    with pytest.raises(ValueError, match=rf"Looking\.{event} may look at gradients"):
        plan(trainer).train()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ByStep, r"trainer\.state\.global_step, which changes"),
        (ByControl, r"trainer\.control\.should_log, which changes"),
        (Keeping, r"changes trainer\.num_losses"),
        (Listing, r"changes trainer\.metrics"),
    ],
)
def test_a_loss_that_depends_on_the_trainers_state_is_refused(tmp_path, kind, message):
    trainer = plan(trainer_of(tmp_path, kind=kind))
    if kind is Listing:
        trainer.metrics = {"calls": []}
    with pytest.raises(CaptureError, match=message):
        trainer.train()
    assert type(trainer) is kind
    assert type(trainer.state) is transformers.TrainerState


class Annealing:
    """A loss function with a number of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, outputs: Any, labels: Any, **_: Any) -> Any:
        return self.factor * outputs.logits.float().square().mean()


@pytest.mark.parametrize("place", ["trainer", "container", "compute_loss_func"])
def test_a_number_that_changes_between_steps_is_refused_at_the_next_one(tmp_path, place):
    trainer: Any = trainer_of(tmp_path, kind=Weighted, num_samples=8, optim="sgd")
    if place == "trainer":
        trainer.weight = 0.5
        change, name = lambda: setattr(trainer, "weight", 0.25), r"trainer\.weight, which is 0\.25"
    elif place == "container":
        trainer.weights = [0.5]
        trainer.compute_loss = lambda *args, **kwargs: (
            transformers.Trainer.compute_loss(trainer, *args, **kwargs) * trainer.weights[0]
        )
        change, name = lambda: trainer.weights.append(1), r"trainer\.weights, which is \[0\.5, 1\]"
    else:
        trainer.weight, trainer.compute_loss_func = 1.0, Annealing()
        change = lambda: setattr(trainer.compute_loss_func, "factor", 0.1)  # noqa: E731
        name = r"factor, which is 0\.1"
    trainer.add_callback(ByCallback(change))
    with pytest.raises(GraphFileError, match=name):
        plan(trainer).train()
    assert trainer.state.global_step == 2


def test_a_loss_with_constants_of_the_trainer_is_the_trainers(tmp_path):
    outcomes = []
    for directory, prepare in ((tmp_path / "a", lambda trainer: trainer), (tmp_path / "b", plan)):
        trainer: Any = trainer_of(directory, kind=Weighted, num_samples=8, num_train_epochs=1)
        trainer.weight = 0.5
        prepare(trainer).train()
        outcomes.append(outcome_of(trainer))
    assert_same(outcomes[1], outcomes[0])


class WithoutPlans:
    """In place of the plans of a training whose refusal needs none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def step(self, *_: Any) -> torch.Tensor:
        return torch.zeros(())

    def close(self) -> None: ...

    def report(self) -> None: ...


@pytest.fixture
def _without_plans(monkeypatch):
    module = "penstock.integrations.transformers._training"
    monkeypatch.setattr(f"{module}.PlannedShapes", WithoutPlans)


@pytest.mark.usefixtures("_without_plans")
@pytest.mark.parametrize(
    ("name", "value"), [("max_grad_norm", 0.1), ("gradient_accumulation_steps", 2)]
)
def test_arguments_that_planned_steps_hold_may_not_change(tmp_path, name, value):
    trainer = trainer_of(tmp_path, num_samples=16)
    trainer.add_callback(ByCallback(lambda: setattr(trainer.args, name, value)))
    with pytest.raises(ValueError, match=rf"trainer\.args\.{name} is {value} now and was"):
        plan(trainer).train()
    assert trainer.state.global_step == 2


@pytest.mark.usefixtures("_without_plans")
def test_gradients_of_another_backward_pass_are_refused(tmp_path):
    trainer: Any = trainer_of(tmp_path, num_samples=16)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    trainer.add_callback(
        ByCallback(lambda: trainer.model(input_ids=tokens, labels=tokens).loss.backward())
    )
    with pytest.raises(ValueError, match=r"wte\.weight' has a gradient before the step"):
        plan(trainer).train()
    assert trainer.state.global_step == 2


class WithoutLength(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.usefixtures("_without_plans")
def test_an_update_over_two_epochs_is_refused(tmp_path):
    """The trainer adds the gradients of the epoch's third micro-batch to the next epoch's."""
    trainer: Any = trainer_of(tmp_path, gradient_accumulation_steps=2, max_steps=4)
    trainer.train_dataset = WithoutLength(list(trainer.train_dataset))
    with pytest.raises(ValueError, match="the epoch ends in the middle of an update"):
        plan(trainer).train()
    assert trainer.state.global_step == 1
