"""The loss of a trainer as a module that can be captured, and the attributes that it reads.

A planned step holds the update as it was captured. Python values that `compute_loss` reads would
keep the values of the capture, so those that change are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError, GraphFileError
from penstock.integrations.transformers._batches import Batch, Update

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS, _MAX_DEPTH = 1000, 3

_CHANGING = {
    "state": {
        "epoch",
        "global_step",
        "num_input_tokens_seen",
        "total_flos",
        "log_history",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
    },
    "control": {
        "should_training_stop",
        "should_epoch_stop",
        "should_save",
        "should_evaluate",
        "should_log",
    },
}
"""Attributes that `Trainer` changes from step to step."""

_WAY_OUT = (
    "pass it as a tensor in the batch (from the collator), keep it in a buffer of the model "
    "(register_buffer) that a callback changes, or train without a plan"
)

_NUM_ITEMS = "num_items_in_batch"
_FACTOR = "num_micro_batches"


class TrainerLoss(nn.Module):
    """The loss as the trainer computes it, and the norm of the gradients.

    It is scaled if losses of micro-batches add up to the loss of the batch.
    """

    grad_norm: torch.Tensor

    def __init__(self, trainer: Any, model: nn.Module, *, is_scaled: bool) -> None:
        super().__init__()
        self.model = model
        self.reads = ReadAttributes(trainer)
        # Their numbers are compared, without those of the whole trainer.
        self.functions = type(trainer).compute_loss, getattr(trainer, "compute_loss_func", None)
        self._is_scaled = is_scaled
        self.register_buffer(
            "grad_norm", torch.zeros((), dtype=torch.float32, device=trainer.args.device)
        )

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Return the loss of a batch that `make_batch` has made."""
        trainer = self.reads.trainer
        num_items = inputs.pop(_NUM_ITEMS, None)
        factor = inputs.pop(_FACTOR, None)
        with self.reads.record(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self.model, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, torch.Tensor)
        # A planned step divides by the number of micro-batches; this loss has been divided.
        return loss if factor is None else loss * factor.to(loss.dtype)

    def make_batch(
        self, update: Update, num_items: torch.Tensor | int | None
    ) -> Batch | list[Batch]:
        """Return the argument of a planned step: the batch, or the micro-batches of an update."""
        extra = (
            {}
            if num_items is None
            else {
                _NUM_ITEMS: torch.as_tensor(num_items, device=getattr(num_items, "device", "cpu"))
            }
        )
        if self.reads.trainer.args.gradient_accumulation_steps == 1:
            return {**update[0], **extra}
        if self._is_scaled:
            extra[_FACTOR] = torch.tensor(float(len(update)), dtype=torch.float32, device="cpu")
        return [{**each, **extra} for each in update]

    def clip(self) -> None:
        """Clip the gradients by the trainer's `max_grad_norm`, and keep their norm."""
        # Without clipping the norm is still logged.
        most = self.reads.trainer.args.max_grad_norm or math.inf
        self.grad_norm.copy_(nn.utils.clip_grad_norm_(self.model.parameters(), most))


class ReadAttributes:
    """Python values of a trainer that its loss reads, and that a captured step holds.

    Copies of a loss share this, and the trainer with it.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._seen: dict[tuple[str, str], Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadAttributes:
        return self

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the attributes of the trainer that are read in the block, which computes its loss.

        Raises:
            CaptureError: It reads an attribute that changes from step to step, or changes one.
        """
        owners = self._list_owners()
        before = {label: dict(vars(owner)) for label, owner in owners.items()}
        seen: dict[tuple[str, str], Any] = {}
        classes = {label: type(owner) for label, owner in owners.items()}
        for label, owner in owners.items():
            owner.__class__ = _subclass_recording(classes[label], label, seen)
        try:
            yield
        finally:
            for label, owner in owners.items():
                owner.__class__ = classes[label]
        for (label, key), fingerprint in seen.items():
            if key in _CHANGING.get(label, ()):
                raise CaptureError(
                    f"the loss looks at trainer.{label}.{key}, which changes while it trains, and "
                    f"a planned step holds it as it was at its capture: {_WAY_OUT}"
                )
            if _fingerprint(vars(owners[label]).get(key)) != fingerprint:
                raise CaptureError(_describe_change(label, key))
        for label, owner in owners.items():
            for key, value in vars(owner).items():
                if key not in before[label] or before[label][key] is not value:
                    raise CaptureError(_describe_change(label, key))
        self._seen |= seen

    def check(self) -> None:
        """Compare the recorded values with the current ones.

        Raises:
            GraphFileError: A value has changed; no step has been taken with it.
        """
        owners = self._list_owners()
        for (label, key), fingerprint in sorted(
            self._seen.items(), key=lambda item: not item[0][0]
        ):
            now = vars(owners[label]).get(key)
            if _fingerprint(now) != fingerprint:
                raise GraphFileError(
                    f"the loss looks at {_format_name(label, key)}, which is {_shorten(now)} now "
                    f"and was another value when the step was captured: {_WAY_OUT}"
                )

    def _list_owners(self) -> dict[str, Any]:
        trainer = self.trainer
        owners = {
            "": trainer,
            "state": trainer.state,
            "control": trainer.control,
            "args": trainer.args,
        }
        function = trainer.compute_loss_func
        function = getattr(function, "__self__", function)
        if _is_user_object(function):
            owners["compute_loss_func"] = function
        return owners


def _subclass_recording(kind: type, label: str, seen: dict[tuple[str, str], Any]) -> type:
    """Make a subclass that records the attributes that are read, with their first values."""

    def __getattribute__(self: Any, name: str) -> Any:
        value = super(subclass, self).__getattribute__(name)
        if name[:2] != "__" and name in object.__getattribute__(self, "__dict__"):
            key = (label, name)
            if key not in seen:
                seen[key] = _fingerprint(value)
        return value

    body = {"__getattribute__": __getattribute__, "__module__": kind.__module__}
    subclass = type(kind.__name__, (kind,), body)
    return subclass


def _fingerprint(value: Any, depth: int = 0) -> Any:
    """Reduce a value for a later comparison: numbers by value, objects by identity."""
    if isinstance(value, _NUMBERS):
        return type(value), value
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return len(value), [(repr(key), _fingerprint(each, depth + 1)) for key, each in items]
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return len(value), [_fingerprint(each, depth + 1) for each in list(items)[:_MAX_ITEMS]]
    if depth < _MAX_DEPTH and _is_user_object(value):
        numbers = {key: each for key, each in vars(value).items() if isinstance(each, _NUMBERS)}
        return id(value), sorted(numbers.items())
    return id(value)


def _is_user_object(value: object) -> bool:
    """Return whether an object is of a class of the user's, which may hold numbers."""
    if isinstance(value, nn.Module | torch.Tensor | type) or not hasattr(value, "__dict__"):
        return False
    root = type(value).__module__.split(".")[0]
    return root not in ("transformers", "accelerate", "torch", "builtins", "penstock", "functools")


def _describe_change(label: str, key: str) -> str:
    return (
        f"the loss changes {_format_name(label, key)}, which planned steps would not do: they run "
        "no Python. Log it in a callback, or train without a plan (penstock.offload)"
    )


def _format_name(label: str, key: str) -> str:
    return ".".join(filter(None, ("trainer", label, key)))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
