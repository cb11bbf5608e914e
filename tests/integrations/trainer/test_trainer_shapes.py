"""Batches of other lengths: padded where the loss stays as it is, planned or ordinary where not."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import transformers

from _trainers import SMALL, VOCAB, arguments_of, assert_same, outcome_of
from penstock.integrations.transformers import PlannedTraining, plan_training
from penstock.integrations.transformers._batches import (
    Padding,
    choose_buckets,
    group_updates,
    read_epoch,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 9, 7, 16, 12, 6, 5, 16, 11, 10)
"""Of ten rows: with two to a batch, in order, batches of 9, 16, 12, 16 and 11."""


def padded_to_longest(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.stack(
            [
                torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=fill)
                for row in rows
            ]
        )
        for name, fill in fills.items()
        if name in rows[0]
    }


def rows_with(lengths: tuple[int, ...], *, has_mask: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        row = {"input_ids": ids, "labels": ids}
        rows.append(row | {"attention_mask": torch.ones_like(ids)} if has_mask else row)
    return rows


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Iterable(torch.utils.data.IterableDataset):
    """Rows of which nothing is known before they come; reading them twice shows."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows
        self.num_read = 0

    def __iter__(self) -> Any:
        for row in self.rows:
            self.num_read += 1
            yield row


def trainer_with(directory: Path, dataset: Any, dropout: float = 0.0, **options: Any) -> Any:
    """Make a trainer of one layer, by default with the optimizer of the fewest operators."""
    options = {"optim": "sgd", "learning_rate": 0.1, **options}
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return InOrder(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments_of(directory, per_device_train_batch_size=2, **options),
        train_dataset=dataset,
        data_collator=padded_to_longest,
    )


def trained(
    directory: Path, dataset: Any, plan: dict[str, Any], **options: Any
) -> tuple[Any, Any, PlannedTraining]:
    """Train with and without a plan."""
    expected = trainer_with(directory / "a", dataset, **options)
    expected.train()
    trainer = trainer_with(directory / "b", dataset, **options)
    training = plan_training(trainer, **plan)
    trainer.train()
    return trainer, expected, training


def assert_close(found: Any, expected: Any, *, loss: float = 1e-6, norm: float = 1e-5) -> None:
    """Compare what was logged, relative."""
    logs = [each.state.log_history for each in (found, expected)]
    assert len(logs[0]) == len(logs[1]) > 2
    for ours, theirs in zip(*logs, strict=True):
        if "loss" in theirs:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm)


def test_lengths_are_learned_and_batches_padded_up_to_them(tmp_path):
    found, expected, training = trained(tmp_path, rows_with(LENGTHS), SMALL)
    assert_close(found, expected)
    report = training.report()
    assert report is not None
    assert report.padding == "padded"
    assert report.num_steps == report.num_planned_steps == 10
    assert report.num_plans == 3  # of 9, 12 and 16: the batch of 11 is padded by less than 3 %
    assert report.num_padded_steps == 2


FULL_AND_MASKED = (9, 9, 9, 5, 7, 7, 7, 3, 9, 4)
"""Of ten rows: two to a batch, every first of a length masks nothing."""


def test_in_half_precision_a_plan_is_for_any_mask_where_batches_are_padded(tmp_path):
    """Transformers leaves out a mask that masks nothing, and runs other kernels then."""
    rows = rows_with(FULL_AND_MASKED)
    found, expected, training = trained(tmp_path, rows, SMALL, bf16=True)
    assert_close(found, expected, loss=1e-2, norm=0.1)
    report = training.report()
    assert report is not None
    assert report.padding == "padded"
    assert report.num_steps == report.num_planned_steps == 10
    assert report.num_plans == 2


def test_in_half_precision_full_masks_have_plans_of_their_own_where_nothing_is_padded(tmp_path):
    rows = rows_with(FULL_AND_MASKED[:6])
    found, expected, training = trained(tmp_path, rows, SMALL, bf16=True, dropout=0.1)
    assert_same(outcome_of(found), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert report.num_steps == report.num_planned_steps == 6
    assert report.num_plans == 3


def test_in_half_precision_a_length_that_comes_late_is_planned_for_any_mask(tmp_path):
    rows = rows_with((7, 7, 24, 24, 24, 5))  # of 24 there can be no longer ones
    dataset = Iterable(rows)
    options = {"bf16": True, "max_steps": 3, "num_train_epochs": 1}
    found, expected, training = trained(tmp_path, dataset, SMALL, **options)
    assert_close(found, expected, loss=1e-2, norm=0.1)
    report = training.report()
    assert report is not None
    assert report.num_steps == report.num_planned_steps == 3


def test_given_lengths_are_those_of_the_plans(tmp_path):
    plan = {**SMALL, "lengths": [12, 18]}
    found, expected, training = trained(tmp_path, rows_with(LENGTHS), plan)
    assert_close(found, expected)
    report = training.report()
    assert report is not None
    assert report.num_plans == 2
    assert report.num_padded_steps == 8
    assert 0 < report.padded_share < 0.2
    with pytest.raises(ValueError, match="lengths"):
        plan_training(found, **{**SMALL, "lengths": [0]})


def test_with_dropout_each_form_has_a_plan_and_all_is_equal_bit_for_bit(tmp_path):
    options = {"dropout": 0.1, "optim": "adamw_torch", "learning_rate": 1e-3}
    found, expected, training = trained(tmp_path, rows_with(LENGTHS[:8]), SMALL, **options)
    assert_same(outcome_of(found), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert "dropout" in report.padding
    assert report.num_plans == 3
    assert report.num_padded_steps == 0


def test_without_a_mask_nothing_is_padded(tmp_path):
    rows = rows_with(LENGTHS[:4], has_mask=False)
    found, expected, training = trained(tmp_path, rows, SMALL)
    assert_same(outcome_of(found), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert "attention_mask" in report.padding


class ByPositions(InOrder):
    """Its loss is a mean over all positions, those of padding included."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).logits.square().mean()


def test_a_loss_that_padding_changes_is_not_padded(tmp_path):
    trainers = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        trainer = trainer_with(directory, rows_with(LENGTHS[:4]))
        trainer.__class__ = ByPositions
        trainers.append(trainer)
    training = plan_training(trainers[1], **SMALL)
    for trainer in trainers:
        trainer.train()
    assert_same(outcome_of(trainers[1]), outcome_of(trainers[0]))
    report = training.report()
    assert report is not None
    assert "not padded: the loss of a batch would be" in report.padding


def test_accumulation_ends_incomplete_and_with_fewer_rows(tmp_path):
    rows = rows_with(LENGTHS[:9])  # micro-batches of 2, 2, 2, 2 and 1 rows, three to an update
    found, expected, training = trained(tmp_path, rows, SMALL, gradient_accumulation_steps=3)
    assert_close(found, expected)
    report = training.report()
    assert report is not None
    assert report.num_steps == report.num_planned_steps == 4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_iterable_data_set_is_read_once_and_planned_as_it_comes(tmp_path, dropout, caplog):
    options = {"max_steps": 3, "dropout": dropout}
    dataset = Iterable(rows_with(LENGTHS[:5]))  # the last batch has one row
    found, expected, training = trained(tmp_path, dataset, SMALL, **options)
    if dropout:
        assert_same(outcome_of(found), outcome_of(expected))
    else:
        assert_close(found, expected)
    assert dataset.num_read == 10  # once by each trainer
    report = training.report()
    assert report is not None
    assert report.num_steps == report.num_planned_steps == 3
    assert "planning for it now" in caplog.text


def test_what_is_rare_runs_as_an_ordinary_step_within_the_budget(tmp_path, caplog):
    plan = {**SMALL, "store": str(tmp_path), "device_memory": "16MiB"}
    dataset = Iterable(rows_with((5, 9, 7, 16, 5, 9, 6, 9, 5, 9)))
    options = {"max_steps": 5, "dropout": 0.1, "optim": "adamw_torch"}
    found, expected, training = trained(tmp_path, dataset, plan, **options)
    assert_same(outcome_of(found), outcome_of(expected))
    report = training.report()
    assert report is not None
    assert report.num_ordinary_steps == 1
    assert report.num_planned_steps == 4
    assert report.num_plans == 1
    assert "an ordinary step, under offload" in caplog.text


class Stateful(torch.utils.data.Dataset):
    """Rows with noise from a generator of its own, and from those of the process."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = dict(self.rows[index])
        shift = int(self.generator.integers(3)) + int(torch.randint(3, ()))
        row["input_ids"] = (row["input_ids"] + shift) % VOCAB
        return row


def test_reading_ahead_changes_no_random_state_of_the_data(tmp_path):
    losses = []
    for directory, plan in ((tmp_path / "a", False), (tmp_path / "b", True)):
        trainer = trainer_with(directory, Stateful(rows_with(LENGTHS[:4])))
        if plan:
            plan_training(trainer, **SMALL)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_an_epoch_is_read_as_the_loader_would(tmp_path):
    trainer = trainer_with(tmp_path, rows_with(LENGTHS))
    batches = read_epoch(trainer.get_train_dataloader())
    assert batches is not None
    assert [each["input_ids"].shape[1] for each in batches] == [9, 16, 12, 16, 11]
    assert batches[1] is not batches[2]
    assert batches[1] is batches[3]  # of one form
    assert [len(each) for each in group_updates(batches, 3)] == [3, 2]
    iterable = trainer_with(tmp_path, Iterable([]), max_steps=1).get_train_dataloader()
    assert read_epoch(iterable) is None


def least_padding(seen: Counter[tuple[int, ...]], most: int) -> int:
    """Try all choices of at most so many of the lengths."""
    lengths = [each for (each,) in seen]
    choices = (
        {max(lengths), *chosen}
        for chosen in itertools.combinations(lengths, min(most, len(lengths)) - 1)
    )
    return min(
        sum(n * (min(b for b in choice if b >= each) - each) for (each,), n in seen.items())
        for choice in choices
    )


def test_buckets_are_those_with_the_least_padding():
    generator = np.random.default_rng(0)
    for _ in range(40):
        drawn = generator.integers(4, 60, size=int(generator.integers(1, 9)))
        seen = Counter({(int(each),): int(generator.integers(1, 20)) for each in drawn})
        most = int(generator.integers(1, 5))
        found = [each for (each,) in choose_buckets(seen, most)]
        assert found == sorted(set(found))
        assert len(found) <= most
        padding = sum(
            n * (min(b for b in found if b >= each) - each) for (each,), n in seen.items()
        )
        total = sum(n * each for (each,), n in seen.items())
        assert padding <= 0.03 * total or padding == least_padding(seen, most)


def test_pairs_of_lengths_belong_to_models_with_a_decoder():
    padding = Padding(3, True)
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.int64),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
        "labels": torch.ones(2, 7, dtype=torch.int64),
        "classes": torch.zeros(2),
    }
    assert padding.find_lengths([batch]) == (5, 7)
    (longer,) = padding.resize([batch], (6, 8))
    assert longer["input_ids"][:, 5].tolist() == [3, 3]
    assert longer["attention_mask"].sum() == 10
    assert longer["labels"][:, 7].tolist() == [-100, -100]
    assert longer["classes"] is batch["classes"]
    assert padding.find_kind([batch]) == padding.find_kind([longer])
    assert padding.find_lengths([{**batch, "bias": torch.zeros(2, 1, 5, 5)}]) is None
    assert Padding(3, False).find_lengths([batch]) is None  # labels of another length
