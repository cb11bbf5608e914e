"""PEFT's LoRA model whose layers are fused, and which takes `adapter_names` in training.

Only `_fuse.py` imports this file, when there is a model of PEFT.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.model import LoraModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from penstock.compat.dynamo import disable_dynamo
from penstock.lora._fused_layer import FusedLayer, find_fused_type, find_stock_type
from penstock.lora._settings import (
    BASE,
    AdapterNames,
    Settings,
    find_settings_uncompiled,
    forget,
    note_change_uncompiled,
    note_use_uncompiled,
)

logger = logging.getLogger(__name__)


class FusedLoraModel(LoraModel):
    """PEFT's `LoraModel` with fused layers."""

    def inject_adapter(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Add an adapter; layers that get their first one are fused."""
        super().inject_adapter(model, *args, **kwargs)
        fuse_layers(model)

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Give the names of a batch's adapters to the layers, in training too."""
        names = kwargs.get("adapter_names")
        beams = kwargs.get("num_beams")
        has_beams = isinstance(beams, int) and beams > 1
        offsets = kwargs.get("alora_offsets")
        if names is None or ((has_beams or offsets is not None) and not self.training):
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                yield
            return
        if has_beams or offsets is not None:
            argument = "num_beams" if has_beams else "alora_offsets"
            raise ValueError(
                f"{argument} and adapter_names are given to a model in training mode; call "
                "model.eval() first"
            )
        _check_names(self, names)
        with _pass_names(self, AdapterNames(names)):
            yield


def fuse_layers(model: nn.Module) -> None:
    """Fuse the layers of a model, and have those that stay PEFT's recall `adapter_names`."""
    for module in model.modules():
        fused_type = find_fused_type(type(module))
        if fused_type is not None and "forward" not in module.__dict__:
            module.__class__ = fused_type
        elif _takes_names(module) and not isinstance(module, FusedLayer):
            hooks = module._forward_pre_hooks
            if recall_names not in hooks.values():
                module.register_forward_pre_hook(recall_names, with_kwargs=True)


def unfuse_layers(model: nn.Module) -> None:
    """Give the layers of a model back to PEFT."""
    for module in model.modules():
        stock_type = find_stock_type(type(module))
        if stock_type is not None:
            module.__class__ = stock_type
        elif _takes_names(module):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is recall_names]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.__dict__.pop(_TAKES_NAMES, None)
        forget(module)


def recall_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give `adapter_names` to a layer of PEFT's that gradient checkpointing calls again."""
    if kwargs.get("adapter_names") is not None or not getattr(module, _TAKES_NAMES, False):
        return None
    settings = find_settings_uncompiled(module, _NO_NAMES)
    return None if settings is None else (args, {**kwargs, "adapter_names": settings.names})


_TAKES_NAMES = "penstock_takes_names"
_NO_NAMES = Settings(None, (), False)


@disable_dynamo
def _get_thread() -> int:
    return threading.get_ident()


def _takes_names(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer | AuxiliaryTrainingWrapper)


def _settings_of(module: nn.Module, names: AdapterNames | None) -> Settings:
    if isinstance(module, FusedLayer):
        return module.current_settings(names)
    return _NO_NAMES._replace(names=names)


@contextlib.contextmanager
def _pass_names(model: FusedLoraModel, names: AdapterNames) -> Iterator[None]:
    """Pass names to the layers that take them, within a call of the model."""
    caller = _get_thread()

    def add_names(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # Hooks are the module's: a pass in another thread has its own names, or none.
        return (args, {**kwargs, "adapter_names": names}) if _get_thread() == caller else None

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if _get_thread() == caller:
            _check_samples(names, main_input, args, kwargs)

    modules = [module for module in model.modules() if _takes_names(module)]
    main_input = getattr(model.model, "main_input_name", None)
    # PEFT calls the one or the other, by the task of the model.
    handles = [
        outermost.register_forward_pre_hook(check, with_kwargs=True)
        for outermost in (model, model.model)
    ]
    try:
        for module in modules:
            # Before `recall_names`, which then has nothing to do.
            handles.append(
                module.register_forward_pre_hook(add_names, with_kwargs=True, prepend=True)
            )
            settings = _settings_of(module, names)
            note_change_uncompiled(module, _settings_of(module, None), settings)
            note_use_uncompiled(module, settings)
            setattr(module, _TAKES_NAMES, True)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            note_change_uncompiled(module, _settings_of(module, names), _settings_of(module, None))


def _check_names(model: FusedLoraModel, names: object) -> None:
    """Refuse names that cannot be followed, before anything is computed."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"adapter_names is {names!r}; accepted is a list with the name of an adapter for each "
            f"sample, {BASE!r} for none"
        )
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # By keys(): torch 2.11 does not compile modules that are unpacked.
    places = [each for layer in layers for each in (layer.lora_A, layer.lora_embedding_A)]
    available = {name for place in places for name in place.keys()}  # noqa: SIM118
    unknown = sorted(set(names) - available - {BASE})
    if unknown:
        raise ValueError(
            f"adapter_names has {', '.join(map(repr, unknown))}; the adapters of the model are "
            f"{', '.join(map(repr, sorted(available)))}, and {BASE!r} is for none"
        )
    if any(layer.merged for layer in layers):
        raise ValueError(
            "adapter_names is given to a model with merged adapters; call unmerge_adapter() first"
        )
    with_dora = sorted({n for layer in layers for n in set(names) if layer.use_dora.get(n)})
    if with_dora:
        raise ValueError(
            f"adapter_names has {', '.join(map(repr, with_dora))}, which uses DoRA; PEFT has no "
            "batches of several adapters with it"
        )
    if model.training and torch.is_grad_enabled():
        for name in sorted(set(names) & available):
            if not any(_is_trained(layer, name) for layer in layers):
                _warn_once(name)


def _is_trained(layer: LoraLayer, name: str) -> bool:
    modules = [each[name] for each in (layer.lora_A, layer.lora_B) if name in each]
    matrices = [
        each[name] for each in (layer.lora_embedding_A, layer.lora_embedding_B) if name in each
    ]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return any(each.requires_grad for each in (*parameters, *matrices))


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "adapter_names has %r, none of whose parameters requires a gradient: it is not trained; "
        "model.base_model.set_adapter([...]) makes several adapters trainable",
        name,
    )


def _check_samples(
    names: Sequence[str],
    main_input: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Refuse a batch of another number of samples than names, before its first layer."""
    keys = (main_input or "input_ids", "input_ids", "inputs_embeds")
    inputs = (*args[:1], *(kwargs.get(key) for key in keys))
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.dim():
            if len(x) != len(names):
                raise ValueError(
                    f"adapter_names has {len(names)} names for a batch of {len(x)} samples; "
                    "accepted is one name a sample"
                )
            return
