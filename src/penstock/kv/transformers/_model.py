"""Models while caches of them live: their attention implementation, and how it is given back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import PenstockError
from penstock.kv._layout import KeyShape
from penstock.kv.transformers._attention import attend_interface
from penstock.kv.transformers._mask import make_range_mask
from penstock.kv.transformers._prefix import note_state, refuse_weights, unwatch_calls, watch_calls

IMPLEMENTATION = "penstock_kv"
"""Name of the attention implementation in Transformers' registries."""

_PREPARE = "_prepare_cache_for_generation"  # a method of `generate`, which some models replace


@dataclass
class _Installation:
    """Caches of one model, the configurations that it changed, and hooks."""

    num_caches: int = 0
    configs: list[Any] = field(default_factory=list)
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)


_installations: weakref.WeakKeyDictionary[PreTrainedModel, _Installation] = (
    weakref.WeakKeyDictionary()
)


@dataclass
class _ConfigInUse:
    """A configuration, what it had before, and the number of models with it that have caches."""

    config: weakref.ref[Any]
    before: str | None
    num_models: int = 0


_in_use: dict[int, _ConfigInUse] = {}  # by identity: models may share a configuration
_lock = threading.RLock()  # of both


def install(model: PreTrainedModel) -> None:
    """Give a model Penstock's attention, for one cache more."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, make_range_mask)
    with _lock:
        installation = _installations.setdefault(model, _Installation())
        installation.num_caches += 1
        if installation.num_caches > 1:
            return
        try:
            _begin(model, installation)
        except BaseException:
            _end(model, installation)
            installation.num_caches -= 1
            raise


def _begin(model: PreTrainedModel, installation: _Installation) -> None:
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in [model.config, *configs.values()]:
        for name in getattr(config, "sub_configs", {}):
            below = getattr(config, name, None)
            if below is not None:
                configs.setdefault(id(below), below)
    for key, config in configs.items():
        if not _is_in_use(config):
            before = getattr(config, "_attn_implementation_internal", None)
            _in_use[key] = _ConfigInUse(weakref.ref(config), before)
        _in_use[key].num_models += 1
        installation.configs.append(config)
    model.set_attn_implementation(IMPLEMENTATION)
    watch_calls(model)
    installation.hooks = [
        module.register_forward_pre_hook(
            _CallCheck(_in_use[id(module.config)].before), with_kwargs=True
        )
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]


def _end(model: PreTrainedModel, installation: _Installation) -> None:
    configs, installation.configs = installation.configs, []
    for config in configs:
        used = _in_use[id(config)]
        used.num_models -= 1
        if used.num_models == 0:
            config._attn_implementation_internal = used.before
            del _in_use[id(config)]
    unwatch_calls(model)
    for hook in installation.hooks:
        hook.remove()


class _CallCheck:
    """Hook before the calls of a model, which copies of the model have as well.

    Args:
        before: The attention implementation that the model had before its first cache.
    """

    def __init__(self, before: str | None) -> None:
        self._before = before

    def __call__(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Refuse what a model would do without its cache, and give a copy its attention back."""
        config = module.config
        if config._attn_implementation == IMPLEMENTATION and not _is_in_use(config):
            # The model was copied, or pickled, while it had a cache, which is not the copy's.
            config._attn_implementation_internal = self._before
        caches = [each for each in (*args, *options.values()) if hasattr(each, "check_prompt")]
        if not caches:
            return
        if not caches[0].get_seq_length():
            note_state(caches[0])
        asked = options.get("output_attentions", getattr(config, "output_attentions", None))
        refuse_weights(asked)  # which some models would leave out of their output
        if module.training:  # layers with gradient checkpointing would leave out the cache
            raise PenstockError(
                f"{type(module).__name__} is in training mode; call model.eval() before it uses "
                "penstock.kv.cache"
            )


def _is_in_use(config: Any) -> bool:
    """Return whether a model with a cache has this very configuration."""
    used = _in_use.get(id(config))
    return used is not None and used.config() is config


def restore(
    reference: weakref.ref[PreTrainedModel], hooks: Sequence[torch.utils.hooks.RemovableHandle]
) -> None:
    """Remove a cache's hooks, and give the model its attention back after its last cache."""
    for hook in hooks:
        hook.remove()
    model = reference()
    if model is None:
        return
    with _lock:
        installation = _installations.get(model)
        if installation is None or installation.num_caches == 0:  # it could not be installed
            return
        installation.num_caches -= 1
        if installation.num_caches == 0:
            _end(model, installation)


def check_supported(model: object) -> None:
    """Raise an error if an object is no model that a cache can be made for."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel; got {type(model).__name__} (of a "
            "compiled model or a wrapper, pass the model inside)"
        )
    if not model._can_set_attn_implementation():
        raise PenstockError(
            f"{type(model).__name__} computes its attention itself, not through Transformers' "
            "attention interface, which penstock.kv.cache needs; use another cache"
        )
    prepare = getattr(type(model), _PREPARE, None)
    is_own = prepare not in (None, getattr(GenerationMixin, _PREPARE))
    if model.config.is_encoder_decoder and is_own:
        raise PenstockError(
            f"{type(model).__name__} prepares the cache of its cross attention itself, in place of "
            "that of penstock.kv.cache; use another cache"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or not {each.type for each in devices} <= {"cpu", "cuda"}:
        raise PenstockError(
            f"penstock.kv.cache takes models on one device, the CPU or a GPU; "
            f"{type(model).__name__} is on {sorted(map(str, devices))}"
        )


def find_attention(model: PreTrainedModel) -> dict[int, tuple[torch.nn.Module, str]]:
    """Return the module of each layer's attention in the decoder, and its name and class."""
    decoder = set(model.get_decoder().modules())  # not the layers of a tower of images or sound
    found: dict[int, tuple[torch.nn.Module, str]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        is_attention = "attention" in type(module).__name__.lower()
        if isinstance(index, int) and is_attention and module in decoder:
            found.setdefault(index, (module, f"{name} ({type(module).__name__})"))
    return found


def find_shape(module: Any) -> KeyShape | None:
    """Return the shape of the keys and values of an attention module, where it can be told."""
    keys, head_dim = getattr(module, "k_proj", None), getattr(module, "head_dim", None)
    values = getattr(module, "v_proj", None) or keys  # some models have values that are keys
    if not isinstance(keys, torch.nn.Linear) or not isinstance(values, torch.nn.Linear):
        return None
    if not isinstance(head_dim, int) or keys.out_features % head_dim:
        return None
    num_heads = keys.out_features // head_dim
    return num_heads, head_dim, values.out_features // num_heads
