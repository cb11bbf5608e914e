"""Transformers: a `Trainer` whose steps run as planned, with one added line.

    plan_training(trainer, device_memory="4GiB", store="/mnt/nvme")
    trainer.train()

The trainer stays as it is: its data, its loss, its optimizer, schedule, clipping, accumulation,
logs, evaluations and checkpoints. Only what it does between a batch and the updated model is one
planned step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

from penstock.executor import ExecutionReport, PlannedStep, fit
from penstock.units import parse_bytes

__all__ = ["PlannedTraining", "plan_trainers", "plan_training"]

_Batch = dict[str, Any]
_NUM_ITEMS = "num_items_in_batch"


def plan_training(
    trainer: transformers.Trainer, *, device_memory: int | str, **options: Any
) -> PlannedTraining:
    """Let a trainer take its steps within a memory budget, exactly as planned.

    The plan is made at the first step, from its batch, so the collator has to give batches of one
    shape. The last batch of an epoch may have fewer samples: it gets a plan of its own. When
    training ends, the model and the optimizer have memory of their own again.

    A loss that is infinite or NaN raises `NonFiniteLossError`, where a trainer goes on. Losses and
    weights are those of the trainer without a plan, bit for bit; where it accumulates
    over a number of micro-batches that is not a power of two, up to rounding, if the model divides
    its loss by the number of items.

    Example:
        >>> training = plan_training(  # doctest: +SKIP
        ...     trainer, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> trainer.train()  # doctest: +SKIP
        >>> print(training.report())  # doctest: +SKIP

    Args:
        trainer: Any `transformers.Trainer`, of one process, that trains on the CPU.
        device_memory: Bytes, or a size such as `"8GiB"`, as of `penstock.fit`.
        **options: Further arguments of `penstock.fit`: `host_memory`, `store`, `machine`,
            `time_limit`, `seed`, `progress`, `cache`, `debug`.

    Returns:
        What runs the steps; `report()` says what they took.

    Raises:
        TypeError, ValueError: An argument is not what it must be. While it trains: what
            `penstock.fit` and planned steps raise; `ValueError` also for a trainer that no plan can
            be made for, or a batch of another shape.
    """
    if not isinstance(trainer, transformers.Trainer):
        kind = type(trainer).__name__
        raise TypeError(f"trainer must be a transformers.Trainer; got {kind}")
    parse_bytes(device_memory, name="device_memory")
    training = PlannedTraining(trainer, {"device_memory": device_memory, **options})
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

    def __init__(self, trainer: transformers.Trainer, options: Mapping[str, Any]) -> None:
        self._trainer: Any = trainer  # what is optional in its types is there once it trains
        self._options = dict(options)
        self._step: PlannedStep | None = None
        self._report: ExecutionReport | None = None
        self._loss: _TrainersLoss | None = None
        self._micro_batches: list[_Batch] = []

    def report(self) -> ExecutionReport | None:
        """Return what the steps took next to what was planned; None before the first step."""
        return self._report if self._step is None else self._step.report()

    def __enter__(self) -> PlannedTraining:
        trainer = self._trainer
        self._replaced = []  # what stood in the instances themselves, if anything
        for owner, name, ours in (
            (trainer, "training_step", self._training_step),
            (trainer.accelerator, "clip_grad_norm_", self._grad_norm),
        ):
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, ours)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, before in self._replaced:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._micro_batches = []
        if self._step is not None:
            self._report = self._step.report()
            step, self._step = self._step, None
            step.close()

    def _grad_norm(self, *_: object, **__: object) -> torch.Tensor:
        """What the trainer logs; the gradients have been clipped within the step."""
        assert self._loss is not None
        return self._loss.grad_norm.clone()

    def _training_step(
        self,
        model: nn.Module,
        inputs: _Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """In the place of `Trainer.training_step`; the update of the model is part of it."""
        trainer = self._trainer
        num_micro_batches = trainer.args.gradient_accumulation_steps
        if trainer.current_gradient_accumulation_steps != num_micro_batches:
            raise ValueError(
                f"an epoch ends with {trainer.current_gradient_accumulation_steps} micro-batches "
                f"instead of gradient_accumulation_steps={num_micro_batches}, and the plan is for "
                "that many: choose a number of samples, or max_steps, for which they come out even"
            )
        model.train()
        batch = dict(trainer._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            batch[_NUM_ITEMS] = torch.as_tensor(num_items_in_batch)
        self._micro_batches.append(batch)
        if len(self._micro_batches) < num_micro_batches:
            return torch.zeros((), device=trainer.args.device)
        batches, self._micro_batches = self._micro_batches, []
        step_batch = batches[0] if num_micro_batches == 1 else batches
        if self._step is None:
            self._step = self._fit(model, step_batch)
        try:
            return self._step(step_batch)
        except ValueError as error:
            raise ValueError(
                f"{error}. Let the collator pad to one length (padding='max_length'): a trainer's "
                "plan is for batches of one shape"
            ) from error

    def _fit(self, model: nn.Module, batch: _Batch | list[_Batch]) -> PlannedStep:
        trainer = self._trainer
        args = trainer.args
        _require_plain(trainer, model)
        num_micro_batches = args.gradient_accumulation_steps
        one = batch[0] if isinstance(batch, list) else batch
        loss = _TrainersLoss(trainer, model, num_micro_batches if _is_scaled(trainer, one) else 1)
        most_norm = args.max_grad_norm or math.inf  # where nothing is clipped the norm is logged

        def clip() -> None:
            norm = nn.utils.clip_grad_norm_(loss.model.parameters(), most_norm)
            loss.grad_norm.copy_(norm)

        self._loss = loss
        optimizer = trainer.optimizer
        return fit(
            loss,
            getattr(optimizer, "optimizer", optimizer),  # as accelerate wraps it
            batch,
            before_step=clip,
            accumulate=None if num_micro_batches == 1 else num_micro_batches,
            also=self._other_batches(batch),
            **self._options,
        )

    def _other_batches(self, batch: _Batch | list[_Batch]) -> list[_Batch]:
        """A batch of each other number of samples that there will be."""
        trainer = self._trainer
        loader = trainer.callback_handler.train_dataloader
        if isinstance(batch, list) or trainer.args.dataloader_drop_last:
            return []
        try:
            num_batches, num_samples = len(loader), trainer.num_examples(loader)
        except (TypeError, AttributeError):  # an iterable dataset
            return []
        sizes = {trainer._train_batch_size}
        if trainer.state.max_steps >= num_batches:  # an epoch comes to its end
            sizes.add(num_samples % trainer._train_batch_size)
        return [_with_samples(batch, size) for size in sorted(sizes - {0, _num_samples(batch)})]


class _TrainersLoss(nn.Module):
    """The loss as the trainer computes it, and the norm of the gradients."""

    grad_norm: torch.Tensor

    def __init__(self, trainer: transformers.Trainer, model: nn.Module, factor: int) -> None:
        super().__init__()
        self.model = model
        self._trainer, self._factor = trainer, factor
        self.register_buffer("grad_norm", torch.zeros((), device=trainer.args.device))

    def forward(self, **inputs: Any) -> torch.Tensor:
        num_items = inputs.pop(_NUM_ITEMS, None)
        with self._trainer.compute_loss_context_manager():
            loss = self._trainer.compute_loss(self.model, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, torch.Tensor)
        # A planned step divides by the number of micro-batches; this loss has been divided.
        return loss if self._factor == 1 else loss * self._factor


def _is_scaled(trainer: transformers.Trainer, batch: _Batch) -> bool:
    """Whether losses of micro-batches add up to the one of the batch, as `Trainer` has it."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return declared
    by_model = trainer.model_accepts_loss_kwargs and _NUM_ITEMS in batch
    return by_model or trainer.compute_loss_func is not None


def _require_plain(trainer: transformers.Trainer, model: nn.Module) -> None:
    accelerator = trainer.accelerator
    if accelerator.num_processes > 1 or model is not accelerator.unwrap_model(model):
        raise ValueError(
            f"the trainer runs in {accelerator.num_processes} processes, its model as a "
            f"{type(model).__name__}: plan_training is for one process. penstock.fit with "
            "before_step=lambda: penstock.executor.average_gradients(model) is for several"
        )
    if getattr(accelerator, "scaler", None) is not None:
        raise ValueError("fp16=True scales the loss by what it finds in a step: use bf16=True")


def _num_samples(batch: _Batch) -> int:
    return next(
        tensor.shape[0]
        for tensor in batch.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    )


def _with_samples(batch: _Batch, num_samples: int) -> _Batch:
    """The batch with fewer samples, or with some of them several times."""
    present = _num_samples(batch)
    rows = torch.arange(num_samples) % present
    return {
        name: value[rows.to(value.device)]
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == present
        else value
        for name, value in batch.items()
    }
