"""The user's program of one step: its arguments are checked, and it is called on fake tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.compat.autocast import outside_autocast
from penstock.errors import CaptureError
from penstock.graph.batches import tensors_in
from penstock.graph.capturing.hooks import (
    describe_accumulation_hooks,
    describe_gradient_hooks,
)
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.fsdp.capture import FsdpCapture
from penstock.graph.step_graph import Kind, Phase

_SCALER = (
    "torch.amp.GradScaler (unscale_) looks for infinities in a step's numbers, so that fp16 with "
    "it cannot be planned: train in bfloat16, or under penstock.offload"
)


class StepProgram(NamedTuple):
    """The arguments of `penstock.capture`, without the optimizer.

    Attributes:
        model: The model.
        batch: The batch that it is called with, or a list of micro-batches.
        loss: `loss(output, batch)` returns the loss; None: the model does.
        before_step: Called between backward and the optimizer's step.
        accumulate: The number of micro-batches; None if the batch is one.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any] | None = None
    before_step: Callable[[], object] | None = None
    accumulate: int | None = None

    def roots(self) -> dict[str, nn.Module]:
        """Return the model, and the loss if that is a module, by their names in a graph."""
        found = {"model": self.model}
        return found | ({"loss": self.loss} if isinstance(self.loss, nn.Module) else {})

    def callables(self) -> dict[str, Any]:
        """Return what it calls, by names for messages."""
        found = {"model": self.model, "loss": self.loss, "before_step": self.before_step}
        return {name: each for name, each in found.items() if each is not None}

    def run(self, recorder: Recorder, root: nn.Module, fsdp: FsdpCapture) -> torch.Tensor:
        """Call it with fake tensors in the model, up to the optimizer's step; return the loss."""
        with fsdp.replace_hooks():
            result = self._run_batches(recorder, fsdp)
        recorder.phase = Phase.OPTIMIZER
        for parameter in root.parameters():
            if parameter.grad is not None:
                storage = recorder.storages.of(parameter.grad)
                if storage.kind is Kind.ACTIVATION:
                    storage.kind = Kind.GRADIENT
                    storage.name = f"{storage.name}.grad"
        if self.before_step is not None:
            with fsdp.replace_norms(), outside_autocast(recorder.device):
                _run_before_step(self.before_step, recorder, root)
        return result

    def _run_batches(self, recorder: Recorder, fsdp: FsdpCapture) -> torch.Tensor:
        """Run forward and backward of the batch, or of one micro-batch after the other."""
        total = None
        with torch.enable_grad():
            for value in self.iter_losses():
                if not value.requires_grad:
                    raise CaptureError(
                        "the loss depends on no parameter that requires a gradient; is the model "
                        "frozen, or the loss detached?"
                    )
                part = value.detach()
                if part in recorder.storages and recorder.storages.of(part).kind.persistent:
                    part = part.clone()  # of a parameter that is the loss, before its update
                recorder.phase = Phase.BACKWARD
                # As in a loop whose autocast is around forward and loss alone.
                with outside_autocast(recorder.device):
                    value.backward()
                    fsdp.after_backward()
                total = part if total is None else total + part
                recorder.phase = Phase.FORWARD
        assert total is not None
        return total

    def iter_losses(self) -> Iterator[torch.Tensor]:
        """Call the model and yield its loss: that of the batch, or of each micro-batch, divided by
        their number.
        """
        num_parts = self.accumulate or 1
        for part in [self.batch] if self.accumulate is None else self.batch:
            value = loss_of(call_model(self.model, part), part, self.loss)
            yield value / num_parts if num_parts > 1 else value


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch, as `capture` does."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, batch: Any, loss: Callable[[Any, Any], Any] | None) -> torch.Tensor:
    """Return the scalar tensor that a step minimises.

    Raises:
        TypeError: There is none.
    """
    if loss is not None:
        value = loss(output, batch)
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"the loss has to be a tensor with one element, and is {shape}; pass "
            "loss=lambda output, batch: ..., or a model whose output has .loss"
        )
    return value


def _run_before_step(
    before_step: Callable[[], object], recorder: Recorder, root: nn.Module
) -> None:
    num_drafts = len(recorder.drafts)
    parameters = [each for each in root.parameters() if each.grad is not None]
    gradients = [each.grad for each in parameters]
    try:
        before_step()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename.endswith("grad_scaler.py") for frame in frames):
            raise CaptureError(f"before_step: {_SCALER}") from error
        raise
    if any(each.grad is not own for each, own in zip(parameters, gradients, strict=True)):
        return
    storages = {recorder.storages.index_of(each) for each in gradients if each is not None}
    touched = {
        recorder.storages.storage_of_value[value]
        for draft in recorder.drafts[num_drafts:]
        for value in draft.needs
    }
    if not storages & touched:
        raise CaptureError(
            "before_step has neither looked at a gradient nor replaced one; it has to ask the "
            "model for its parameters when it is called (model.parameters()), as these are others "
            f"during a capture. What changes parameters alone belongs between steps. {_SCALER}"
        )


def check_optimizer(optimizer: object) -> None:
    """Raise unless the argument is an optimizer of PyTorch, and wraps none (Accelerate, Lightning).

    Raises:
        TypeError: It is none; the message names its class, and the way to the optimizer within.
    """
    kind = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {kind} around an optimizer of class {type(inner).__name__}; pass "
            "optimizer.optimizer: a planned step scales and accumulates gradients itself"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer has to be a torch.optim.Optimizer, and is a {kind}")


def check_program(program: StepProgram) -> None:
    """Raise unless the model is one as `check_model` says, and what else is called can be.

    Raises:
        TypeError: Something is no module, or no function; the message names the argument.
        CaptureError: The model is one whose code a capture does not see.
    """
    check_model(program.model)
    for name, value in (("loss", program.loss), ("before_step", program.before_step)):
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r}: pass a function, or leave it out")


def check_model(model: object) -> None:
    """Raise unless the argument is a module whose code a capture can see.

    Raises:
        TypeError: It is no module.
        CaptureError: It is wrapped or compiled, or has hooks on gradients.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be an nn.Module, and is a {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureError(
                f"{name or 'model'} is wrapped for data parallelism; pass its .module, with "
                "before_step=lambda: penstock.executor.average_gradients(model)"
            )
        if _is_compiled(module):
            raise CaptureError(
                f"{name or 'model'} is compiled (torch.compile, torch.jit), and what it runs is "
                "not seen; pass the module as it was before"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CaptureError(
                f"parameter {name!r} gets its shape in the first call; call the model once before"
            )
        for describe in (describe_gradient_hooks, describe_accumulation_hooks):
            if (hooks := describe(name, parameter)) is not None:
                raise CaptureError(hooks)


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def check_accumulation(batch: Any, accumulate: int | None) -> None:
    """Compare the number of micro-batches with `accumulate`.

    Raises:
        ValueError: The batch has another number of them.
    """
    if accumulate is None:
        return
    found = len(batch) if isinstance(batch, list | tuple) else type(batch).__name__
    if type(accumulate) is not int or found != accumulate or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate!r}: the batch has to be a list of so many micro-batches, at "
            f"least one, and is {found if isinstance(found, str) else f'one of {found}'}"
        )


def find_device_type(root: nn.Module, batch: Any) -> str:
    """Return the type of the device that parameters are on, or else of the batch's.

    Raises:
        CaptureError: There are several.
    """
    types = {each.device.type for each in root.parameters()} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            f"the parameters are on {', '.join(sorted(types))}; a step graph is of one device"
        )
    types = types or {each.device.type for _, each in tensors_in(batch, "batch")} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            "the parameters are on the meta device, and the batch's tensors on "
            f"{', '.join(sorted(types))}, so the device of the step is not known; move the batch "
            "to one"
        )
    return types.pop() if types else "cpu"
