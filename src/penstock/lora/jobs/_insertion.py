"""Adapters that come into a base and leave it, through PEFT, also where PEFT fails halfway."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.compat.random_numbers import keep_random_state
from penstock.lora._adapters import Adapter
from penstock.lora.jobs._checks import check_adapter_layers
from penstock.lora.jobs._packed_model import PackedModel
from penstock.lora.jobs._seeds import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig


# By base the object that has it: two would give one model each other's adapters.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def check_owner(base: object, owner: object) -> None:
    """Refuse a base that another object has claimed and not released.

    Args:
        base: The model.
        owner: The object that is to have it.

    Raises:
        ValueError: Another has it.
    """
    found = _owners.get(base) if isinstance(base, nn.Module) else None
    if found is not None and found() not in (None, owner):
        raise ValueError(
            f"base_model (a {type(base).__name__}) is already that of another Jobs: add jobs to "
            "that one, or close it first"
        )


def claim_base(base: nn.Module, owner: object) -> None:
    """Let an object have a base alone, until it releases it or is gone.

    Args:
        base: The model.
        owner: The object.

    Raises:
        ValueError: Another has it.
    """
    check_owner(base, owner)
    _owners[base] = weakref.ref(owner)


def release_base(base: nn.Module, owner: object) -> None:
    """Give a base back that an object has.

    Args:
        base: The model.
        owner: The object; nothing is done where another has the base.
    """
    if base in _owners and _owners[base]() is owner:
        del _owners[base]


# PEFT draws initial weights from torch's own generator, which all threads have in common.
_seeding = threading.Lock()


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
            ValueError: A target module is unknown or no linear layer, or PEFT refuses the config.
        """
        from peft import get_peft_model

        self._check_targets(name, config)
        with _seeding, keep_random_state(self._packed.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            torch.manual_seed(derive_seed(seed, "weights"))
            try:
                if self.peft is None:
                    self.peft = get_peft_model(self._base, config, adapter_name=name)
                else:
                    self.peft.add_adapter(name, config)
            except (ValueError, TypeError, re.error) as error:
                raise ValueError(
                    f"job {name!r}: PEFT refused the config: {error} (change target_modules; "
                    f"{self._describe_linear()})"
                ) from error
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

    def _check_targets(self, name: str, config: LoraConfig) -> None:
        """Refuse a target that no module has: PEFT passes over it where others have theirs."""
        targets = config.target_modules
        if not isinstance(targets, list | tuple | set):
            return
        paths = [f".{path}" for path, _ in self._base.named_modules()]
        unknown = sorted(
            str(t) for t in targets if not any(path.endswith(f".{t}") for path in paths)
        )
        if unknown:
            raise ValueError(
                f"job {name!r}: target_modules has {unknown}, which the model does not have; "
                f"{self._describe_linear()}"
            )

    def _describe_linear(self) -> str:
        from transformers.pytorch_utils import Conv1D

        names = {
            path.removesuffix(".base_layer").rpartition(".")[2]
            for path, module in self._base.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in path
        }
        return f"its linear layers are {sorted(names)}"

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
