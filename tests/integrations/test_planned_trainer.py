"""`plan_training`: what `Trainer` logs, saves and trains is the same, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import _models
import penstock
from penstock.errors import InfeasibleError

pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import transformers

from penstock.integrations.transformers import plan_trainers, plan_training

BATCH, SEQ, VOCAB = 4, 32, 128
BUDGET = "768KiB"  # the step's parameters, moments and gradients have 1.1 MiB
PLAN: dict[str, Any] = {
    "device_memory": BUDGET,
    "host_memory": "1GiB",
    "machine": "h200",
    "time_limit": 0.3,
    "cache": False,
    "debug": True,
}

pytestmark = pytest.mark.usefixtures("one_thread")


class HalvingTrainer(transformers.Trainer):
    """With a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss / 2


def trainer_of(
    directory: Path,
    *,
    kind: type[transformers.Trainer] = transformers.Trainer,
    num_samples: int = 10,
    lengths: tuple[int, ...] = (SEQ,),
    **options: Any,
) -> transformers.Trainer:
    model: Any = _models.build("gpt2", hidden=64, layers=2, heads=2, seq=SEQ, vocab=VOCAB)
    tokens = torch.randint(1, VOCAB, (num_samples, SEQ), generator=torch.Generator().manual_seed(1))
    rows = [row[: lengths[i // BATCH % len(lengths)]] for i, row in enumerate(tokens)]
    dataset: Any = [{"input_ids": row, "labels": row} for row in rows]
    settings = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        **options,
    }
    return kind(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(directory), **settings),
        train_dataset=dataset,
        eval_dataset=dataset[:BATCH],
    )


def outcome_of(trainer: transformers.Trainer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What was logged, without times, and the weights."""
    logged = [
        {
            name: value
            for name, value in entry.items()
            if name in ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
        }
        for entry in trainer.state.log_history
    ]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return logged, weights


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[0] == expected[0]
    assert len(found[0]) > 2
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 2},
    "accumulation": {"gradient_accumulation_steps": 2, "num_samples": 16},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "own loss": {"kind": HalvingTrainer},
    "bf16": {"bf16": True},
    "without clipping": {"max_grad_norm": 0.0},
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
    training = plan_training(trainer, **PLAN)
    assert training.report() is None
    trainer.train()
    assert_same(outcome_of(trainer), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert report.num_steps in (2, 4)  # of the plan that ran last
    assert report.arena_bytes + report.workspace_bytes <= 768 << 10
    assert sum(report.moved_bytes.values()) > 0


def test_checkpoints_are_those_of_the_trainer(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
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
    expected = trainer_of(tmp_path / "a")
    for _ in range(2):
        expected.train()
    trainer = trainer_of(tmp_path / "b")
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
    expected = trainer_of(tmp_path / "a")
    expected.train()
    trainer = trainer_of(tmp_path / "b")
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
    expected = trainer_of(tmp_path / "a")
    expected.train()
    with plan_trainers(**PLAN) as trainings:
        trainer = trainer_of(tmp_path / "b")
        training = plan_training(trainer, **PLAN)
        trainer.train()
    assert_same(outcome_of(trainer), outcome_of(expected))
    reports = [training.report(), *(each.report() for each in trainings)]
    assert sum(report is not None for report in reports) == 1
    assert "training_step" not in vars(trainer)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_batches_of_other_shapes_are_refused_and_nothing_is_lost(tmp_path):
    trainer = trainer_of(tmp_path, num_samples=8, lengths=(SEQ, SEQ // 2), seed=3)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(8))
    training = plan_training(trainer, **PLAN)
    with pytest.raises(ValueError, match=r"padding='max_length'"):
        trainer.train()
    report = training.report()
    assert report is not None
    assert report.num_steps == 1
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert "training_step" not in vars(trainer)


def test_an_epoch_that_ends_within_an_update_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, num_samples=12, gradient_accumulation_steps=2)
    plan_training(trainer, **PLAN)
    with pytest.raises(ValueError, match="ends with 1 micro-batches"):
        trainer.train()


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"transformers\.Trainer; got Linear"):
        plan_training(torch.nn.Linear(1, 1), device_memory="1GiB")  # pyright: ignore[reportArgumentType]
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="device_memory"):
        plan_training(trainer, device_memory="much")
    plan_training(trainer, **{**PLAN, "device_memory": "64KiB"})
    with pytest.raises(InfeasibleError):
        trainer.train()


def test_the_module_is_loaded_when_it_is_asked_for():
    assert penstock.integrations.transformers.plan_training is plan_training
