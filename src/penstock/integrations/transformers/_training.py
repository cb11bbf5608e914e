"""The steps of a trainer as planned: its `training_step` and its clipping are replaced.

A planned step is forward, backward, clipping and the optimizer. Methods and callbacks inside of an
update would not run, so trainers that have any are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

from penstock.integrations.transformers._batches import Batch, Update
from penstock.integrations.transformers._loss import TrainerLoss
from penstock.integrations.transformers._shapes import (
    PlannedShapes,
    TrainingReport,
    check_lengths,
)
from penstock.units import parse_bytes

_METHODS = (
    "training_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_run_epoch",
    "_inner_training_loop",
)
"""Methods of `Trainer` that planned steps replace, or depend on the order of."""

_EVENTS = {
    "on_pre_optimizer_step": "gradients before the update",
    "on_optimizer_step": "gradients after the update",
}
"""Methods of callbacks that find no gradients in a planned step, with the values they look for."""

_HELD = ("gradient_accumulation_steps", "max_grad_norm")
"""Arguments of a trainer that planned steps hold as they were at the capture."""

_WITHOUT_PLAN = "train without a plan (penstock.offload)"

_ONE_PROCESS = (
    "plan_training is for one process. penstock.fit with before_step=lambda: "
    "penstock.executor.average_gradients(model) is for several"
)


def plan_training(
    trainer: transformers.Trainer,
    *,
    device_memory: int | str,
    lengths: Sequence[int | Sequence[int]] | None = None,
    **options: Any,
) -> PlannedTraining:
    """Plan the steps of a trainer for a memory budget.

    Plans are made at the first step, for the forms of batches in an epoch of the trainer's loader,
    which is read ahead in another process. Batches of other lengths are padded up to the next of at
    most six lengths if the loss does not change: the batch has an `attention_mask`, labels of
    padding are ignored, and the model draws no random numbers (dropout); that is tried out before
    training. Otherwise each form has a plan of its own. A form that appears later runs as an
    ordinary step under `penstock.offload`, within the budget beside the model, or gets a plan then;
    the log says so, and the report counts them.

    A loss that is infinite or NaN raises `NonFiniteLossError`, while a trainer goes on. Losses and
    weights are those of the trainer without a plan, bit for bit; with padded batches up to
    rounding, as sums have other orders, and also if it accumulates over a number of micro-batches
    that is not a power of two and the model divides its loss by the number of items.

    Example:
        >>> training = plan_training(  # doctest: +SKIP
        ...     trainer, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> trainer.train()  # doctest: +SKIP
        >>> print(training.report())  # doctest: +SKIP

    Args:
        trainer: Any `transformers.Trainer`, of one process, that trains on the CPU.
        device_memory: Budget of a step in bytes, or a size such as `"8GiB"`.
        lengths: Lengths to pad batches to (pairs for a model with encoder and decoder); None learns
            them from the loader.
        **options: Further arguments of `penstock.fit`: `host_memory`, `store`, `machine`,
            `split_products`, `time_limit`, `seed`, `progress`, `cache`, `debug`.

    Returns:
        The planned training; its `report()` has times and bytes of the steps.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value. While it trains: the errors
            of `penstock.fit` and of planned steps; `ValueError` also for a trainer that cannot be
            planned.
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
        **options: `device_memory`, and further arguments of `penstock.fit`.

    Yields:
        The trainings of the block, in the order in which they began.
    """
    trainings: list[PlannedTraining] = []
    train = transformers.Trainer.train

    def planned_train(self: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
        training = PlannedTraining(self, options)
        trainings.append(training)
        with training:
            return train(self, *args, **kwargs)

    with mock.patch.object(transformers.Trainer, "train", planned_train):
        yield trainings


class PlannedTraining:
    """The planned steps of a trainer; `plan_training` returns it."""

    def __init__(
        self,
        trainer: transformers.Trainer,
        options: Mapping[str, Any],
        lengths: Sequence[int | Sequence[int]] | None = None,
    ) -> None:
        self._trainer: Any = trainer  # its optional attributes are set once it trains
        self._options = dict(options)
        self._lengths = lengths
        self._shapes: PlannedShapes | None = None
        self._report: TrainingReport | None = None
        self._loss: TrainerLoss | None = None
        self._micro_batches: list[Batch] = []
        self._is_ordinary = False
        self._held: dict[str, Any] = {}
        self._replaced = ExitStack()

    def report(self) -> TrainingReport | None:
        """Return the measured steps beside all plans; None before the first step."""
        return self._report if self._shapes is None else self._shapes.report()

    def __enter__(self) -> PlannedTraining:
        trainer = self._trainer
        _refuse_unplanned(trainer)
        for owner, name, method in (
            (trainer, "training_step", self._take_training_step),
            (trainer.accelerator, "clip_grad_norm_", self._return_grad_norm),
        ):
            self._replaced.enter_context(mock.patch.object(owner, name, method))
        _TRAINING.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _TRAINING.remove(self)
        self._replaced.close()
        self._micro_batches = []
        if self._shapes is not None:
            shapes, self._shapes = self._shapes, None
            shapes.close()
            self._report = shapes.report()

    def _return_grad_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the norm for the trainer's log; a planned step has clipped its own gradients."""
        if self._is_ordinary:
            accelerator = self._trainer.accelerator
            return type(accelerator).clip_grad_norm_(accelerator, *args, **kwargs)
        assert self._loss is not None
        return self._loss.grad_norm.clone()

    def _take_training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Replace `Trainer.training_step`; the update of the model is part of it."""
        trainer = self._trainer
        num_micro_batches = trainer.current_gradient_accumulation_steps
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._check_update(model, num_micro_batches)
        self._micro_batches.append(dict(trainer._prepare_inputs(inputs)))
        if len(self._micro_batches) < num_micro_batches:
            return torch.zeros((), dtype=torch.float32, device=trainer.args.device)
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
        with self._shapes.offload_step():
            losses = [
                transformers.Trainer.training_step(trainer, model, dict(batch), num_items_in_batch)
                for batch in update
            ]
        return torch.stack(losses).sum()

    def _check_update(self, model: nn.Module, num_micro_batches: int) -> None:
        """Refuse an update that the trainer makes otherwise than the planned step would."""
        trainer = self._trainer
        for name, before in self._held.items():
            now = getattr(trainer.args, name)
            if now != before:
                raise ValueError(
                    f"trainer.args.{name} is {now!r} now and was {before!r} when the steps were "
                    f"planned, which hold it: put it back, or {_WITHOUT_PLAN}"
                )
        num_so_far = len(self._micro_batches)
        is_last = num_so_far + 1 >= num_micro_batches
        if is_last != trainer.accelerator.sync_gradients:
            raise ValueError(
                "the epoch ends in the middle of an update: the trainer, which does not know the "
                "length of its data set, adds the gradients of the last micro-batches to the next "
                "epoch's first update. Give the data set a length (__len__), or as many samples "
                f"as full updates take, or {_WITHOUT_PLAN}"
            )
        for name, parameter in model.named_parameters() if not num_so_far else ():
            if parameter.grad is not None and parameter.requires_grad:
                raise ValueError(
                    f"{name!r} has a gradient before the step, of a backward pass outside of it: "
                    "the trainer would add to it, and planned steps begin without gradients. Call "
                    f"model.zero_grad() after that pass, or {_WITHOUT_PLAN}"
                )

    def _start(
        self, model: nn.Module, update: Update, num_items: torch.Tensor | int | None
    ) -> None:
        trainer = self._trainer
        _refuse_unplanned(trainer)  # also callbacks that were added since
        if model is not trainer.accelerator.unwrap_model(model):
            raise ValueError(
                f"the trainer's model is wrapped as a {type(model).__name__}: {_ONE_PROCESS}"
            )
        self._held = {name: getattr(trainer.args, name) for name in _HELD}
        self._loss = TrainerLoss(trainer, model, is_scaled=_is_scaled(trainer, num_items))
        self._shapes = PlannedShapes(
            trainer, self._loss, self._options, self._lengths, first=(update, num_items)
        )


def _refuse_unplanned(trainer: Any) -> None:
    """Refuse a trainer with parts of its program that planned steps would not run."""
    for name in _METHODS:
        stock = getattr(transformers.Trainer, name, None)
        instead = vars(trainer).get(name)
        is_own = isinstance(getattr(instead, "__self__", None), PlannedTraining)
        if getattr(type(trainer), name, None) is not stock or not (instead is None or is_own):
            raise ValueError(
                f"{type(trainer).__name__}.{name} is not Trainer's own, and planned steps would "
                "not call it: put its work into compute_loss, into the model or into the "
                f"optimizer, or {_WITHOUT_PLAN}"
            )
    events = dict(_EVENTS)
    if trainer.args.gradient_accumulation_steps > 1:
        events["on_substep_end"] = "gradients between micro-batches"
    for callback in trainer.callback_handler.callbacks:
        for name, meaning in events.items():
            stock = getattr(transformers.TrainerCallback, name, None)
            if getattr(type(callback), name, None) is not stock or name in vars(callback):
                raise ValueError(
                    f"{type(callback).__name__}.{name} may look at {meaning}, which a planned step "
                    "does not have, as it is one with its update: remove the callback, use "
                    f"on_step_end, or {_WITHOUT_PLAN}"
                )
    accelerator = trainer.accelerator
    if accelerator.num_processes > 1:
        raise ValueError(
            f"the trainer runs in {accelerator.num_processes} processes: {_ONE_PROCESS}"
        )
    if getattr(accelerator, "scaler", None) is not None or trainer.args.fp16:
        raise ValueError("fp16=True scales the loss by what it finds in a step: use bf16=True")
    if "backward" in vars(accelerator):
        raise ValueError(
            "accelerator.backward has been replaced, and planned steps would not call it: train "
            "without a plan (penstock.offload)"
        )


def _is_scaled(trainer: transformers.Trainer, num_items: torch.Tensor | int | None) -> bool:
    """Return whether losses of micro-batches add up to the loss of the batch in `Trainer`."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return declared
    by_model = trainer.model_accepts_loss_kwargs and num_items is not None
    return by_model or trainer.compute_loss_func is not None


_TRAINING: list[PlannedTraining] = []
"""Planned trainings in progress."""


def is_training() -> bool:
    """Return whether a trainer is training as planned now."""
    return bool(_TRAINING)
