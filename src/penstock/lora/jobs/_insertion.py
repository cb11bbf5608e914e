"""Adapters that come into a base and leave it, through PEFT, also where PEFT fails halfway."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from penstock.lora._adapters import Adapter
from penstock.lora.jobs._checks import check_adapter_layers
from penstock.lora.jobs._packed_model import PackedModel
from penstock.lora.jobs._seeds import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig


class AdapterHost:
    """A base with the adapters that it has.

    Attributes:
        peft: The PEFT model; None without adapters.
    """

    def __init__(self, packed: PackedModel) -> None:
        self.peft: Any = None
        self._packed, self._base = packed, packed.model

    def insert(self, name: str, config: LoraConfig, seed: int) -> dict[str, Adapter]:
        """Give the base a job's adapter, with initial weights from the job's seed.

        Args:
            name: The job.
            config: Its config, which PEFT completes.
            seed: Its seed.

        Returns:
            By layer the adapter's parameters.

        Raises:
            ValueError: A target module is no linear layer, or none is.
        """
        from peft import get_peft_model

        device = self._packed.device
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            torch.manual_seed(derive_seed(seed, "weights"))
            if self.peft is None:
                self.peft = get_peft_model(self._base, config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        layers = self._packed.find_layers()
        check_adapter_layers(name, layers)
        self._packed.check_layers()
        self.peft.set_adapter(name)
        adapters = {
            layer_name: Adapter(
                layer.lora_A[name].weight.requires_grad_(True),
                layer.lora_B[name].weight.requires_grad_(True),
                float(layer.scaling[name]),
                float(getattr(layer.lora_dropout[name], "p", 0.0)),
            )
            for layer_name, layer in layers.items()
            if name in layer.lora_A
        }
        if not adapters:
            raise ValueError(f"job {name!r}: no linear layer is among its target_modules")
        return adapters

    def delete(self, name: str) -> None:
        """Take an adapter out of the base, or what PEFT put there of it before it failed."""
        names = [] if self.peft is None else list(self.peft.peft_config)
        others = [each for each in names if each != name]
        if self.peft is not None and others:
            self.peft.set_adapter(others[0])
            if name in names:
                self.peft.delete_adapter(name)
        for path, layer in self._packed.find_layers().items():
            if name in layer.lora_A or name in layer.lora_embedding_A:
                layer.delete_adapter(name)
            if not (layer.lora_A or layer.lora_embedding_A):
                parent, _, attribute = path.rpartition(".")
                setattr(self._base.get_submodule(parent), attribute, layer.base_layer)
        if not others:
            self.peft = None
            if hasattr(self._base, "peft_config"):
                del self._base.peft_config
        self._packed.find_layers()
