"""Transformers: a `Trainer` whose steps run as planned, with one added line.

    plan_training(trainer, device_memory="4GiB", store="/mnt/nvme")
    trainer.train()

The trainer stays as it is: its data, its loss, its optimizer, schedule, clipping, accumulation,
logs, evaluations and checkpoints. Only what it does between a batch and the updated model is one
planned step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":  # it is there, and something that it needs is not
        raise
    raise ModuleNotFoundError(
        "penstock.integrations.transformers needs Transformers: pip install 'penstock[demo]' "
        "accelerate",
        name=error.name,
    ) from error

from penstock.integrations._trainer_batches import Batch, Update
from penstock.integrations._trainer_guards import refuse_unplanned, refuse_wrapped
from penstock.integrations._trainer_loss import TrainersLoss
from penstock.integrations._trainer_report import TrainingReport
from penstock.integrations._trainer_shapes import PlannedShapes, check_lengths
from penstock.units import parse_bytes

__all__ = ["PlannedTraining", "TrainingReport", "plan_trainers", "plan_training"]


def plan_training(
    trainer: transformers.Trainer,
    *,
    device_memory: int | str,
    lengths: Sequence[int | Sequence[int]] | None = None,
    **options: Any,
) -> PlannedTraining:
    """Let a trainer take its steps within a memory budget, exactly as planned.

    Plans are made at the first step, for the forms of batches in an epoch of the trainer's loader,
    which is read ahead in another process. Batches of other lengths are padded up to the next of at
    most six lengths where that leaves the loss as it is: the batch has an `attention_mask`, labels
    of padding are ignored, and the model draws no random numbers (dropout); that is tried out
    before training. Where it does not, each form has a plan of its own. A form that turns up later
    runs as an ordinary step under `penstock.offload`, within what the budget leaves beside the
    model, or gets a plan then; the log says so, and the report counts them.

    A loss that is infinite or NaN raises `NonFiniteLossError`, where a trainer goes on. Losses and
    weights are those of the trainer without a plan, bit for bit. Up to rounding they are where
    batches are padded, as sums have other orders, and where it accumulates over a number of
    micro-batches that is not a power of two, if the model divides its loss by the number of items.

    Example:
        >>> training = plan_training(  # doctest: +SKIP
        ...     trainer, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> trainer.train()  # doctest: +SKIP
        >>> print(training.report())  # doctest: +SKIP

    Args:
        trainer: Any `transformers.Trainer`, of one process, that trains on the CPU.
        device_memory: Bytes, or a size such as `"8GiB"`, as of `penstock.fit`.
        lengths: Lengths to pad batches to, of a model with encoder and decoder pairs of them; None:
            learned from the loader.
        **options: Further arguments of `penstock.fit`: `host_memory`, `store`, `machine`,
            `time_limit`, `seed`, `progress`, `cache`, `debug`.

    Returns:
        What runs the steps; `report()` says what they took.

    Raises:
        TypeError, ValueError: An argument is not what it must be. While it trains: what
            `penstock.fit` and planned steps raise; `ValueError` also for a trainer that no plan can
            be made for.
    """
    if not isinstance(trainer, transformers.Trainer):
        kind = type(trainer).__name__
        raise TypeError(f"trainer must be a transformers.Trainer; got {kind}")
    parse_bytes(device_memory, name="device_memory")
    check_lengths(lengths)
    training = PlannedTraining(trainer, {"device_memory": device_memory, **options}, lengths)
    train = trainer.train

    def planned_train(*args: Any, **kwargs: Any) -> Any:
        with training:
            return train(*args, **kwargs)

    trainer.train = planned_train
    return training


@contextmanager
def plan_trainers(**options: Any) -> Iterator[list[PlannedTraining]]:
    """Plan the training of every trainer that trains in the block.

    Example:
        >>> with plan_trainers(device_memory="4GiB", store="/mnt/nvme") as trainings:
        ...     train()  # doctest: +SKIP

    Args:
        **options: As of `plan_training`.

    Returns:
        The trainings of the block, in the order in which they began.
    """
    trainings: list[PlannedTraining] = []
    train = transformers.Trainer.train

    def planned_train(self: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
        training = PlannedTraining(self, options)
        trainings.append(training)
        with training:
            return train(self, *args, **kwargs)

    transformers.Trainer.train = planned_train
    try:
        yield trainings
    finally:
        transformers.Trainer.train = train


class PlannedTraining:
    """The steps of a trainer, as planned; `plan_training` makes it."""

    def __init__(
        self,
        trainer: transformers.Trainer,
        options: Mapping[str, Any],
        lengths: Sequence[int | Sequence[int]] | None = None,
    ) -> None:
        self._trainer: Any = trainer  # what is optional in its types is there once it trains
        self._options = dict(options)
        self._lengths = lengths
        self._shapes: PlannedShapes | None = None
        self._report: TrainingReport | None = None
        self._loss: TrainersLoss | None = None
        self._micro_batches: list[Batch] = []
        self._is_ordinary = False

    def report(self) -> TrainingReport | None:
        """Return what the steps took next to what was planned, of all plans; None before the first
        step.
        """
        return self._report if self._shapes is None else self._shapes.report()

    def __enter__(self) -> PlannedTraining:
        trainer = self._trainer
        refuse_unplanned(trainer, PlannedTraining)
        self._replaced = []  # what stood in the instances themselves, if anything
        for owner, name, ours in (
            (trainer, "training_step", self._training_step),
            (trainer.accelerator, "clip_grad_norm_", self._grad_norm),
        ):
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, ours)
        _TRAINING.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _TRAINING.remove(self)
        for owner, name, before in self._replaced:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._micro_batches = []
        if self._shapes is not None:
            shapes, self._shapes = self._shapes, None
            shapes.close()
            self._report = shapes.report()

    def _grad_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the trainer logs; of a planned step the gradients have been clipped in it."""
        if self._is_ordinary:
            accelerator = self._trainer.accelerator
            return type(accelerator).clip_grad_norm_(accelerator, *args, **kwargs)
        assert self._loss is not None
        return self._loss.grad_norm.clone()

    def _training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """In the place of `Trainer.training_step`; the update of the model is part of it."""
        trainer = self._trainer
        num_micro_batches = trainer.current_gradient_accumulation_steps
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._micro_batches.append(dict(trainer._prepare_inputs(inputs)))
        if len(self._micro_batches) < num_micro_batches:
            return torch.zeros((), device=trainer.args.device)
        update, self._micro_batches = self._micro_batches, []
        if self._shapes is None:
            self._start(model, update, num_items_in_batch)
        assert self._shapes is not None
        assert self._loss is not None
        self._loss.reads.check()
        loss = self._shapes.step(update, num_items_in_batch)
        self._is_ordinary = loss is None
        if loss is not None:
            return loss
        with self._shapes.offloading():
            losses = [
                transformers.Trainer.training_step(trainer, model, dict(batch), num_items_in_batch)
                for batch in update
            ]
        return torch.stack(losses).sum()

    def _start(
        self, model: nn.Module, update: Update, num_items: torch.Tensor | int | None
    ) -> None:
        trainer = self._trainer
        refuse_unplanned(trainer, PlannedTraining)  # also callbacks that came when it began
        refuse_wrapped(trainer, model)
        self._loss = TrainersLoss(trainer, model, is_scaled=_is_scaled(trainer, num_items))
        self._shapes = PlannedShapes(
            trainer, self._loss, self._options, self._lengths, first=(update, num_items)
        )


def _is_scaled(trainer: transformers.Trainer, num_items: torch.Tensor | int | None) -> bool:
    """Whether losses of micro-batches add up to the one of the batch, as `Trainer` has it."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return declared
    by_model = trainer.model_accepts_loss_kwargs and num_items is not None
    return by_model or trainer.compute_loss_func is not None


_TRAINING: list[PlannedTraining] = []
"""Those that are training now."""


def is_training() -> bool:
    """Tell whether a trainer is training as planned, so that what trains is its own."""
    return bool(_TRAINING)
