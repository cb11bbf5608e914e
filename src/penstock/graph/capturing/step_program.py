"""The user's program of one step, called once on stand-ins: forward, backward, `before_step`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.fsdp.capture import Gathering
from penstock.graph.step_graph import Kind, Phase

_SCALER = (
    "torch.amp.GradScaler (unscale_) looks for infinities in a step's numbers, so that fp16 with "
    "it cannot be planned: train in bfloat16, or under penstock.offload"
)


class StepProgram(NamedTuple):
    """What a user gives `capture`, without the optimizer.

    Attributes:
        model: The model.
        batch: What it is called with.
        loss: As of `capture`.
        before_step: As of `capture`.
        accumulate: As of `capture`.
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

    def run(self, recorder: Recorder, root: nn.Module, gathering: Gathering) -> torch.Tensor:
        """Call it with stand-ins in the model, under a recorder; up to the optimizer's step.

        Args:
            recorder: What writes it down.
            root: The modules.
            gathering: What gathers a sharded model's parameters.

        Returns:
            The loss.
        """
        with gathering.active():
            result = self._all_gradients(recorder, gathering)
        recorder.phase = Phase.OPTIMIZER
        for parameter in root.parameters():
            if parameter.grad is not None:
                block = recorder.block(parameter.grad)
                if block.kind is Kind.ACTIVATION:
                    block.kind = Kind.GRADIENT
                    block.name = f"{block.name}.grad"
        if self.before_step is not None:
            with gathering.norms_over_ranks():
                _run_before_step(self.before_step, recorder, root)
        return result

    def _all_gradients(self, recorder: Recorder, gathering: Gathering) -> torch.Tensor:
        """Forward and backward of the batch, or of one micro-batch after the other."""
        if self.accumulate is None:
            return self._gradients(self.batch, recorder, gathering, 1)
        total = None
        for part in self.batch:
            recorder.phase = Phase.FORWARD
            value = self._gradients(part, recorder, gathering, self.accumulate)
            total = value if total is None else total + value
        assert total is not None
        return total

    def _gradients(
        self, batch: Any, recorder: Recorder, gathering: Gathering, num_parts: int
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
            gathering.after_backward()
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


def check_accumulation(batch: Any, accumulate: int | None) -> None:
    """Compare the number of micro-batches with `accumulate`.

    Raises:
        ValueError: The batch has another number of them.
    """
    if accumulate is None:
        return
    found = len(batch) if isinstance(batch, list | tuple) else type(batch).__name__
    if found != accumulate or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate}: the batch has to be a list of so many micro-batches, at "
            f"least one, and is {found if isinstance(found, str) else f'one of {found}'}"
        )


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
    blocks = {id(recorder.block(gradient)) for gradient in gradients}
    touched = {
        id(recorder.blocks[recorder.block_of_value[value]])
        for draft in recorder.drafts[num_drafts:]
        for value in (*draft.reads, *(old for old, _ in draft.mutates))
    }
    if not blocks & touched:
        raise CaptureError(
            "before_step has not looked at any gradient; it has to ask the model for its "
            "parameters when it is called (model.parameters()), as these are others during a "
            f"capture. {_SCALER}"
        )
