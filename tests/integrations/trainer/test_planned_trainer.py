"""`plan_training`: what `Trainer` logs, saves and trains is the same, within a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from penstock.errors import InfeasibleError

pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import transformers

from _trainers import BATCH, BUDGET, PLAN, SPLITTING, assert_same, outcome_of, trainer_of
from penstock.integrations.transformers import plan_trainers, plan_training
from penstock.units import parse_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


class HalvingTrainer(transformers.Trainer):
    """With a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss / 2


ONE_FORM: dict[str, Any] = {"num_samples": 2 * BATCH}  # no smaller batch ends an epoch
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 2, **ONE_FORM},
    "accumulation": {"gradient_accumulation_steps": 2, "num_samples": 16},
    "label smoothing": {"label_smoothing_factor": 0.1, **ONE_FORM},
    "own loss": {"kind": HalvingTrainer, **ONE_FORM},
    "bf16": {"bf16": True, **ONE_FORM},
    "without clipping": {"max_grad_norm": 0.0, **ONE_FORM},
    "accumulation of means": {
        "kind": HalvingTrainer,
        "gradient_accumulation_steps": 2,
        "num_samples": 16,
        "label_smoothing_factor": 0.1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_planned_trainer_is_the_trainer_bit_for_bit(tmp_path, case):
    expected = trainer_of(tmp_path / "a", **CASES[case])
    expected.train()
    trainer = trainer_of(tmp_path / "b", **CASES[case])
    budget = SPLITTING if case == "plain" else BUDGET
    training = plan_training(trainer, **{**PLAN, "device_memory": budget})
    assert training.report() is None
    trainer.train()
    assert_same(outcome_of(trainer), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert report.num_steps == report.num_planned_steps == trainer.state.global_step
    assert report.num_plans == len(report.plans) == (1 if "num_samples" in CASES[case] else 2)
    assert "planned steps" in str(report)
    assert len(report.to_dict()["plans"]) == len(report.plans)
    assert report.arena_bytes + report.workspace_bytes <= parse_bytes(budget, name="budget")
    assert sum(report.moved_bytes.values()) > 0


def test_checkpoints_are_those_of_the_trainer(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, **ONE_FORM}
    expected = trainer_of(tmp_path / "a", **saving)
    expected.train()
    trainer = trainer_of(tmp_path / "b", **saving)
    plan_training(trainer, **PLAN)
    trainer.train()
    saved = tmp_path / "b" / "checkpoint-2" / "optimizer.pt"
    same = tmp_path / "a" / "checkpoint-2" / "optimizer.pt"
    assert saved.stat().st_size < 1.1 * same.stat().st_size  # its tensors, not the arena
    resumed = trainer_of(tmp_path / "c", **saving)
    plan_training(resumed, **PLAN)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    for each in (trainer, resumed):
        assert_same(outcome_of(each), outcome_of(expected))


def test_a_trainer_can_train_again_and_without_a_plan_afterwards(tmp_path):
    options = {"num_train_epochs": 1, **ONE_FORM}
    expected = trainer_of(tmp_path / "a", **options)
    for _ in range(2):
        expected.train()
    trainer = trainer_of(tmp_path / "b", **options)
    plan_training(trainer, **PLAN)
    for _ in range(2):
        trainer.train()
    assert_same(outcome_of(trainer), outcome_of(expected))
    assert "training_step" not in vars(trainer)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    for parameter in trainer.model.parameters():  # nothing is left of the arena
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    model: Any = trainer.model
    model(**next(iter(trainer.get_train_dataloader()))).loss.backward()


def test_every_trainer_of_a_block_is_planned(tmp_path):
    expected = trainer_of(tmp_path / "a", **ONE_FORM)
    expected.train()
    trainer = trainer_of(tmp_path / "b", **ONE_FORM)
    train = transformers.Trainer.train
    with plan_trainers(**PLAN) as trainings:
        trainer.train()
    assert transformers.Trainer.train is train
    assert_same(outcome_of(trainer), outcome_of(expected))
    (report,) = (training.report() for training in trainings)
    assert report is not None
    assert sum(report.moved_bytes.values()) > 0


def test_of_two_plans_for_one_trainer_the_inner_one_runs(tmp_path):
    """As where a script that plans its trainer itself is run with `penstock run --plan`."""
    expected = trainer_of(tmp_path / "a", **ONE_FORM)
    expected.train()
    with plan_trainers(**PLAN) as trainings:
        trainer = trainer_of(tmp_path / "b", **ONE_FORM)
        training = plan_training(trainer, **PLAN)
        trainer.train()
    assert_same(outcome_of(trainer), outcome_of(expected))
    reports = [training.report(), *(each.report() for each in trainings)]
    assert sum(report is not None for report in reports) == 1
    assert "training_step" not in vars(trainer)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"transformers\.Trainer; got Linear"):
        plan_training(torch.nn.Linear(1, 1), device_memory="1GiB")  # pyright: ignore[reportArgumentType]
    trainer = trainer_of(tmp_path, **ONE_FORM)
    with pytest.raises(ValueError, match="device_memory"):
        plan_training(trainer, device_memory="much")
    plan_training(trainer, **{**PLAN, "device_memory": "64KiB"})
    with pytest.raises(InfeasibleError):
        trainer.train()


def test_the_module_is_loaded_when_it_is_asked_for():
    assert penstock.integrations.transformers.plan_training is plan_training
