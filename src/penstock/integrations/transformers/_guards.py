"""Guards of a planned `Trainer`: parts of its program that a plan cannot hold are refused by name.

A planned step holds the update as it was captured: forward, backward, clipping and the optimizer.
Methods and callbacks inside of an update would not run, and Python values that `compute_loss` reads
would keep the values of the capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from penstock.errors import CaptureError, GraphFileError

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS, _MAX_DEPTH = 1000, 3

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


def refuse_unplanned(trainer: Any, own: type) -> None:
    """Refuse a trainer with parts of its program that planned steps would not run.

    Bound methods of the class `own` may replace the trainer's.

    Raises:
        ValueError: The message names the method or callback, and the remedy.
    """
    for name in _METHODS:
        stock = getattr(transformers.Trainer, name, None)
        instead = vars(trainer).get(name)
        is_own = isinstance(getattr(instead, "__self__", None), own)
        if getattr(type(trainer), name, None) is not stock or not (instead is None or is_own):
            raise ValueError(
                f"{type(trainer).__name__}.{name} is not Trainer's own, and planned steps would "
                "not call it: put its work into compute_loss, into the model or into the "
                "optimizer, or train without a plan (penstock.offload)"
            )
    callbacks = trainer.callback_handler.callbacks
    events = dict(_EVENTS)
    if trainer.args.gradient_accumulation_steps > 1:
        events["on_substep_end"] = "gradients between micro-batches"
    for callback in callbacks:
        for name, meaning in events.items():
            if _overrides(callback, name):
                raise ValueError(
                    f"{type(callback).__name__}.{name} may look at {meaning}, which a planned step "
                    "does not have, as it is one with its update: remove the callback, use "
                    "on_step_end, or train without a plan (penstock.offload)"
                )
    _refuse_setting(trainer)


def _refuse_setting(trainer: Any) -> None:
    accelerator = trainer.accelerator
    if accelerator.num_processes > 1:
        raise ValueError(
            f"the trainer runs in {accelerator.num_processes} processes: plan_training is for one "
            "process. penstock.fit with before_step=lambda: "
            "penstock.executor.average_gradients(model) is for several"
        )
    if getattr(accelerator, "scaler", None) is not None or trainer.args.fp16:
        raise ValueError("fp16=True scales the loss by what it finds in a step: use bf16=True")
    if "backward" in vars(accelerator):
        raise ValueError(
            "accelerator.backward has been replaced, and planned steps would not call it: train "
            "without a plan (penstock.offload)"
        )


def refuse_wrapped(trainer: Any, model: nn.Module) -> None:
    """Refuse a model that is wrapped for several processes."""
    if model is not trainer.accelerator.unwrap_model(model):
        raise ValueError(
            f"the trainer's model is wrapped as a {type(model).__name__}: plan_training is for one "
            "process. penstock.fit with before_step=lambda: "
            "penstock.executor.average_gradients(model) is for several"
        )


def _overrides(callback: Any, name: str) -> bool:
    stock = getattr(transformers.TrainerCallback, name, None)
    return getattr(type(callback), name, None) is not stock or name in vars(callback)


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
