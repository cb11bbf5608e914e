"""The user's program of one step, called on fake tensors: forward, backward, `before_step`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import CaptureError
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

    def run(self, recorder: Recorder, root: nn.Module, fsdp: FsdpCapture) -> torch.Tensor:
        """Call it with fake tensors in the model, up to the optimizer's step.

        Returns:
            The loss.
        """
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
            with fsdp.replace_norms():
                _run_before_step(self.before_step, recorder, root)
        return result

    def _run_batches(self, recorder: Recorder, fsdp: FsdpCapture) -> torch.Tensor:
        """Run forward and backward of the batch, or of one micro-batch after the other."""
        if self.accumulate is None:
            return self._run_batch(self.batch, recorder, fsdp, 1)
        total = None
        for part in self.batch:
            recorder.phase = Phase.FORWARD
            value = self._run_batch(part, recorder, fsdp, self.accumulate)
            total = value if total is None else total + value
        assert total is not None
        return total

    def _run_batch(
        self, batch: Any, recorder: Recorder, fsdp: FsdpCapture, num_parts: int
    ) -> torch.Tensor:
        with torch.enable_grad():
            value = loss_of(call_model(self.model, batch), batch, self.loss)
            if num_parts > 1:
                value = value / num_parts
            if not value.requires_grad:
                raise CaptureError(
                    "the loss depends on no parameter that requires a gradient; is the model "
                    "frozen, or the loss detached?"
                )
            recorder.phase = Phase.BACKWARD
            value.backward()
            fsdp.after_backward()
        return value.detach()


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
    try:
        before_step()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename.endswith("grad_scaler.py") for frame in frames):
            raise CaptureError(f"before_step: {_SCALER}") from error
        raise
    gradients = [each.grad for each in root.parameters() if each.grad is not None]
    storages = {recorder.storages.index_of(gradient) for gradient in gradients}
    touched = {
        recorder.storages.storage_of_value[value]
        for draft in recorder.drafts[num_drafts:]
        for value in draft.needs
    }
    if not storages & touched:
        raise CaptureError(
            "before_step has not looked at any gradient; it has to ask the model for its "
            "parameters when it is called (model.parameters()), as these are others during a "
            f"capture. {_SCALER}"
        )
