"""Refusals: arguments, adapters and models with which jobs on one base cannot be exact."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.lora._adapters import Adapter
from penstock.lora.jobs._packed_model import list_dropouts

if TYPE_CHECKING:
    from peft import LoraConfig

# Fields of LoraConfig that may have any value; `init_lora_weights` and `bias` are looked at.
_FREE_FIELDS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
    "fan_in_fan_out", "use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "init_lora_weights", "runtime_config", "loftq_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")

_REMEDIES = {
    "modules_to_save": "the base is frozen and shared: train those modules in a run of their own",
    "trainable_token_indices": "the base is frozen and shared: train tokens in a run of their own",
    "bias": 'the base is frozen and shared: use bias="none"',
    "use_dora": "train DoRA with stock PEFT, or use plain LoRA",
    "lora_bias": "use lora_bias=False",
}


def check_name(name: object, model: nn.Module) -> None:
    """Refuse a job's name that is no folder's and adapter's name in any model.

    Raises:
        ValueError: The name is not of letters, digits, "_" and "-", or has another meaning in PEFT.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ValueError(f"name is {name!r}; accepted are letters, digits, '_' and '-'")
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    is_taken = name in parts or hasattr(nn.ModuleDict(), name) or name in ("weight", "bias")
    if is_taken or "lora_" in name:
        raise ValueError(
            f"name is {name!r}, which has a meaning of its own in PEFT or names a module of the "
            "model: choose another"
        )


def check_config(job: str, config: Any) -> LoraConfig:
    """Return a copy of a LoraConfig if plain LoRA on linear layers is all that it asks for.

    Raises:
        TypeError: It is another kind of config.
        ValueError: A field asks for more; the message names the field and the remedy.
    """
    import copy

    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise TypeError(f"job {job!r}: config is a {type(config).__name__}; accepted is LoraConfig")
    plain = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _FREE_FIELDS or value == getattr(plain, field.name) or not value:
            continue
        remedy = _REMEDIES.get(field.name, "leave it out, or train that job with stock PEFT")
        raise ValueError(
            f"job {job!r}: LoraConfig({field.name}={value!r}) is not possible here: {remedy}"
        )
    initialisation = config.init_lora_weights
    if not isinstance(initialisation, bool | str) or initialisation not in _INITIALISATIONS:
        raise ValueError(
            f"job {job!r}: LoraConfig(init_lora_weights={config.init_lora_weights!r}) changes or "
            f"reads the base's weights; accepted are {_INITIALISATIONS}"
        )
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise ValueError(f"job {job!r}: LoraConfig has the ranks {ranks}; accepted are ranks >= 1")
    alphas = [config.lora_alpha, *(config.alpha_pattern or {}).values()]
    if not all(isinstance(alpha, int | float) and math.isfinite(alpha) for alpha in alphas):
        raise ValueError(
            f"job {job!r}: LoraConfig has the alphas {alphas}; accepted are finite numbers"
        )
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(
            f"job {job!r}: LoraConfig(lora_dropout={config.lora_dropout}); accepted are "
            "probabilities in [0, 1)"
        )
    return copy.deepcopy(config)


def check_base(model: Any) -> None:
    """Refuse a base on which samples cannot stand back to back, as far as its config says.

    Raises:
        TypeError: It is no causal language model of Transformers, or already a PEFT model.
        ValueError: It has dropout of its own, is an encoder and decoder, or has positions that
            depend on the longest sample of a pass.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    if isinstance(model, PeftModel) or getattr(model, "peft_config", None):
        raise TypeError(
            "base_model is already a PEFT model; Jobs makes the adapters itself: give the model "
            "without them (PeftModel.unload, or merge_and_unload to train on top of them)"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"base_model is a {type(model).__name__}; accepted are causal language models of "
            "Transformers"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder and decoder, not a causal model")
    if names := list_dropouts(model):
        raise ValueError(
            f"{type(model).__name__} has dropout of its own ({', '.join(names[:4])}), which would "
            "draw another mask beside other jobs: set its probabilities to 0 in the model's config "
            "before the model is made; LoraConfig(lora_dropout=...) is the job's own"
        )


def find_inexact_dtype(model: nn.Module) -> str:
    """Return the reason for which bits of a base's passes are not known; empty for float32.

    Args:
        model: The base model, on the CPU in float32 or float64 where there is no reason.
    """
    for name, each in model.named_parameters():
        if each.device.type != "cpu" or each.dtype not in (torch.float32, torch.float64):
            return (
                f"parameter {name} is {each.dtype} on {each.device.type}; rows keep their bits in "
                "float32 and float64 on the CPU only"
            )
    return ""


def count_writes(model: nn.Module) -> int:
    """Return how often parameters of a base were written to, as far as torch counts it.

    Args:
        model: The base model; its adapters are not counted.
    """
    return sum(
        each._version
        for name, each in model.named_parameters()
        if ".lora_" not in name and not each.is_inference()
    )


def check_positions(model: Any, num_rows: int) -> None:
    """Refuse rotary frequencies that depend on the longest sample of a pass.

    Args:
        model: The base model.
        num_rows: The most tokens of a sample.

    Raises:
        ValueError: The frequencies are "dynamic" or "longrope", and samples may be long enough.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = rope if any(isinstance(each, dict) for each in rope.values()) else {"": rope}
    for parameters in kinds.values():
        kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
        known = (
            parameters.get("original_max_position_embeddings")
            if isinstance(parameters, dict)
            else None
        ) or getattr(config, "original_max_position_embeddings", None)
        known = known or getattr(config, "max_position_embeddings", 0)
        if kind in ("dynamic", "longrope") and num_rows > known:
            raise ValueError(
                f"{type(model).__name__} has rotary positions of the kind {kind!r}, whose "
                f"frequencies depend on the longest sample of a pass from {known} tokens on: set "
                "max_tokens to at most that"
            )


def check_adapter_layers(job: str, layers: dict[str, Any]) -> None:
    """Refuse layers of a job's adapter that are no plain LoRA on a linear layer.

    Args:
        job: Name of the job and of its adapter.
        layers: PEFT's LoRA layers by name.

    Raises:
        ValueError: A layer is of another kind.
    """
    from peft.tuners.lora.layer import Linear

    from penstock.lora._fused_layer import FusedLayer

    for name, layer in layers.items():
        has_adapter = any(
            job in getattr(layer, part, ()) for part in ("lora_A", "lora_embedding_A")
        )
        if not has_adapter:
            continue
        if isinstance(layer, FusedLayer):
            raise ValueError(
                f"job {job!r}: target module {name} is fused, which Jobs does by itself: call "
                "penstock.lora.unfuse(jobs.peft_model) first"
            )
        if type(layer) is not Linear or job in getattr(layer, "lora_variant", ()):
            base = type(layer.base_layer).__name__
            raise ValueError(
                f"job {job!r}: target module {name} is a {base}, with adapters of the kind "
                f"{type(layer).__name__}; accepted are linear layers with plain LoRA: leave it out "
                "of target_modules, or train that job with stock PEFT"
            )


def check_adapters_kept(job: str, adapters: Mapping[str, Adapter], layers: dict[str, Any]) -> None:
    """Refuse to go on with an adapter that the model no longer has as the job does.

    Args:
        job: Name of the job and of its adapter.
        adapters: By layer the job's parameters.
        layers: PEFT's LoRA layers by name.

    Raises:
        ValueError: Adapters are merged into the base, or a layer lacks the job's adapter, has
            other parameters or another scaling in its place, or hooks on its gradients.
    """
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(
            f"adapters are merged into the base (layer {merged[0]}), where job {job!r} would be "
            "trained on top of them: call jobs.peft_model.unmerge_adapter() first"
        )
    for name, adapter in adapters.items():
        layer = layers.get(name)
        if layer is None or job not in layer.lora_A:
            raise ValueError(
                f"job {job!r}: layer {name} no longer has its adapter (delete_adapter, unload or "
                "merge_and_unload of the PEFT model); remove the job"
            )
        if (
            layer.lora_A[job].weight is not adapter.down
            or layer.lora_B[job].weight is not adapter.up
        ):
            raise ValueError(
                f"job {job!r}: layer {name} has other parameters in place of the adapter's, which "
                "the job's optimizer does not hold; copy numbers into the adapter's, or remove the "
                "job and add it again"
            )
        _check_hooks(job, name, adapter)
        if float(layer.scaling[job]) != adapter.scaling:
            raise ValueError(
                f"job {job!r}: layer {name} has the scaling {float(layer.scaling[job])}, and the "
                f"job is trained with {adapter.scaling}; set it back, or remove the job and add it "
                "with another lora_alpha"
            )


def _check_hooks(job: str, layer: str, adapter: Adapter) -> None:
    for each in (adapter.down, adapter.up):
        if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"job {job!r}: layer {layer} has hooks on the gradients of its adapter, which "
                "passes over several jobs do not run: remove them, and change gradients in the "
                "optimizer (register_step_pre_hook)"
            )
