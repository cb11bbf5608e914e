"""The loss of a trainer as a module that can be captured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from penstock.integrations.transformers._batches import Batch, Update
from penstock.integrations.transformers._guards import ReadAttributes

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
        self._is_scaled = is_scaled
        self.register_buffer("grad_norm", torch.zeros((), device=trainer.args.device))

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
        extra = {} if num_items is None else {_NUM_ITEMS: torch.as_tensor(num_items)}
        if self.reads.trainer.args.gradient_accumulation_steps == 1:
            return {**update[0], **extra}
        if self._is_scaled:
            extra[_FACTOR] = torch.tensor(float(len(update)))
        return [{**each, **extra} for each in update]

    def clip(self) -> None:
        """Clip the gradients by the trainer's `max_grad_norm`, and keep their norm."""
        # Without clipping the norm is still logged.
        most = self.reads.trainer.args.max_grad_norm or math.inf
        self.grad_norm.copy_(nn.utils.clip_grad_norm_(self.model.parameters(), most))
