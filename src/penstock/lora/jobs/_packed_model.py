"""A PEFT model on micro-batches: its layers are led through `penstock.lora.linear` for the time.

Nothing of the model is changed but its layers' `forward`, its training mode and the name of its
attention, and those only within `open`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.lora._linear import add, linear
from penstock.lora.jobs._attention import PackingError, attend_by_sample
from penstock.lora.jobs._micro_batch import MicroBatch

_numbers = itertools.count()
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class PackedModel:
    """A model of Transformers whose LoRA layers take their adapters from a micro-batch.

    Attributes:
        model: The model, without PEFT's outer classes.
        device: Device of the model's tokens.
        num_attentions: Calls of attention functions in the last pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device
        self.num_attentions = 0
        self._name = f"penstock_jobs_{next(_numbers)}"
        self._batch: MicroBatch | None = None
        self._calls = [0]
        self._layers: dict[str, Any] = {}
        self._parts: list[tuple[str, nn.Module]] = []

    def find_layers(self) -> dict[str, Any]:
        """Return PEFT's LoRA layers by name, after adapters came or went."""
        from peft.tuners.lora.layer import LoraLayer

        found: dict[str, Any] = {
            name: m for name, m in self.model.named_modules() if isinstance(m, LoraLayer)
        }
        self._layers = found
        self._parts = [
            (f"{name}.{part}", module)
            for name, layer in found.items()
            for part, module in layer.named_modules()
            if part
        ]
        return found

    def check_layers(self) -> None:
        """Refuse layers in which more happens than base product, dropout and low-rank addition.

        Raises:
            ValueError: A layer's `forward` was replaced, or one of its parts has hooks or is
                another module than PEFT put there.
        """
        for name, layer in self._layers.items():
            if "forward" in vars(layer):
                raise ValueError(
                    f"layer {name} has a forward that was put in place of PEFT's: undo that first "
                    "(penstock.lora.unfuse for fused models)"
                )
            for adapter, module in layer.lora_dropout.items():
                if type(module) not in (nn.Dropout, nn.Identity):
                    raise ValueError(
                        f"{name}.lora_dropout.{adapter} is a {type(module).__name__}; Jobs "
                        "computes PEFT's own modules only: put them back"
                    )
        for name, module in self._parts:
            if "forward" in vars(module) or any(getattr(module, each) for each in _HOOKS):
                raise ValueError(
                    f"{name} has hooks or a forward of its own, which a pass over several jobs "
                    "would not run: remove them, or hook the LoRA layer itself"
                )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make the model ready for micro-batches: forward and backward passes belong inside."""
        resting = [module for module in self.model.modules() if not module.training]
        layers = self._layers
        self.check_layers()
        try:
            self.model.train()
            for name, layer in layers.items():
                layer.forward = self._lead(name, layer)
            with attend_by_sample(self.model, self._name, self._runs) as self._calls:
                yield
        finally:
            self._batch = None
            for layer in layers.values():
                vars(layer).pop("forward", None)
            for module in resting:
                module.training = False

    def run(self, batch: MicroBatch) -> Tensor:
        """Return the logits of a micro-batch's rows, `(num_rows, vocabulary)`.

        The backward pass is to be done before the next call: recomputation reads the same batch.
        """
        self._batch = batch
        self._calls[0] = 0
        output = self.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False)
        self.num_attentions = self._calls[0]
        return output.logits.squeeze(0)  # whose gradient is no copy, as that of [0] is

    def _runs(self) -> list[tuple[int, bool]]:
        assert self._batch is not None
        return self._batch.runs

    def _lead(self, name: str, layer: Any) -> Callable[..., Tensor]:
        base = layer.base_layer
        is_plain = type(base) is nn.Linear

        def forward(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
            batch = self._batch
            use = batch.layers.get(name) if batch is not None else None
            if batch is None or use is None:
                return base(x, *arguments, **named)
            if x.shape[:-1].numel() != batch.num_rows:
                raise PackingError(
                    f"layer {name} gets {x.shape[:-1].numel()} rows of {batch.num_rows} tokens"
                )
            if is_plain:
                return linear(x, base.weight, base.bias, use.adapters, use.rows, seed=use.seeds)
            return add(base(x), x, use.adapters, use.rows, seed=use.seeds)

        return forward


def list_dropouts(model: nn.Module) -> list[str]:
    """Return the names of a base model's own dropout modules that drop anything."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
        and module.p > 0
        and ".lora_dropout." not in f".{name}."
    ]


def no_gradient_message() -> str:
    """Return the message for a pass that gives adapters no gradient."""
    return (
        "a pass gives some adapters no gradient; with gradient checkpointing use "
        "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': "
        "False}); otherwise leave layers out of target_modules that the model does not use"
    )
