"""Attention function that is registered with Transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock.compat.dynamo import run_uncompiled
from penstock.errors import PenstockError
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule, attend
from penstock.kv._visibility import Visibility
from penstock.kv.transformers._layer import KeysPlaceholder, autocast_dtype
from penstock.kv.transformers._mask import RangeMask

# Arguments of a model's call that do not change its attention, or are in its mask already.
_WITHOUT_EFFECT = {
    "cache_position",
    "is_causal",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "token_type_ids",
    "use_cache",
}


@run_uncompiled(reason="penstock.kv keeps keys and values outside of graphs")
def attend_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RangeMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention over a pool's layer, or over tensors where the call has no pool.

    Args:
        module: The model's attention module.
        query: `(B, Hq, n, key_dim)`.
        key: `(B, H, tokens, key_dim)`, or a placeholder.
        value: `(B, H, tokens, value_dim)`, or a placeholder.
        attention_mask: A `RangeMask`, or a mask of the user's `(B, 1 or Hq, n, tokens)`.
        dropout: Must be 0 over a pool.
        scaling: Factor of the scores; None: 1 / sqrt(key_dim).
        softcap: c of c tanh(s / c).
        position_bias: `(1, Hq, n, tokens)`, added to the scores.
        s_aux: `(Hq,)`: scores of attention sinks, keys whose value is 0.
        **kwargs: Arguments that change nothing, or are None.

    Returns:
        `(B, n, Hq, value_dim)`, and None for the weights.

    Raises:
        PenstockError: An argument that is not supported.
        ValueError, TypeError: The mask has another shape or dtype.
    """
    rule_arguments = attention_mask, dropout, scaling, softcap, position_bias, s_aux
    if torch.is_autocast_enabled(query.device.type):  # as that does to attention of torch
        dtype = autocast_dtype(query)
        if isinstance(key, KeysPlaceholder):
            query = query.to(key.dtype)
        else:
            query, key, value = (each.to(autocast_dtype(each)) for each in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            out, weights = attend_interface(module, query, key, value, *rule_arguments, **kwargs)
        return out.to(dtype), weights
    for name, given in kwargs.items():
        if name not in _WITHOUT_EFFECT and given is not None and given is not False:
            raise PenstockError(
                f"{type(module).__name__} passes {name}= to its attention, which penstock.kv.cache "
                "does not support; use another cache for this model, or do not ask for it"
            )
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise PenstockError(
            f"{type(module).__name__} passes s_aux= of the shape {tuple(s_aux.shape)} to its "
            f"attention, where penstock.kv.cache takes one score of each head, "
            f"({query.shape[1]},); use another cache for this model"
        )
    if not isinstance(key, KeysPlaceholder):
        is_causal = kwargs.get("is_causal")
        return _attend_tensors(module, query, key, value, *rule_arguments, is_causal)
    if module.training or dropout:
        raise PenstockError(
            f"{key.layer.name} is in training mode; call model.eval() before it uses "
            "penstock.kv.cache"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        key.layer.refuse_gradients()
    key.layer.check_reader(module)
    is_causal = kwargs.get("is_causal")
    visibility, bias = _read_mask(module, query, key, attention_mask, is_causal, key.start)
    rule = _make_rule(query, scaling, softcap, position_bias, bias, s_aux, key.start)
    layer = key.layer
    out = attend_pool(
        layer.pool,
        layer.index,
        query,
        rule,
        visibility,
        first_token=key.start,
        fresh=layer.pending,
    )
    layer.finish_attention()
    return out.transpose(1, 2).contiguous(), None


def _read_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: RangeMask | torch.Tensor | None,
    is_causal: bool | None,
    start: int,
) -> tuple[Visibility, torch.Tensor | None]:
    """Return the tokens that are visible, and what a mask of numbers adds to the scores."""
    if isinstance(mask, RangeMask):
        return mask.visibility, None
    if mask is None:  # as Transformers' own function for SDPA takes it
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        is_causal = is_causal and query.shape[2] > 1
        return Visibility(len(query), start, is_causal, device=query.device), None
    B, Hq, n = query.shape[:3]
    is_shaped = mask.dim() == 4 and mask.shape[2:] == (n, key.shape[2])
    if not is_shaped or mask.shape[0] not in (1, B) or mask.shape[1] not in (1, Hq):
        raise ValueError(
            f"attention_mask must have the shape (1 or {B}, 1 or {Hq}, {n}, {key.shape[2]}); got "
            f"{tuple(mask.shape)}"
        )
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask of the shape {tuple(mask.shape)} must be bool, or numbers that are "
            f"added to the scores, in a floating dtype; got {mask.dtype}"
        )
    if mask.dtype == torch.bool:
        return Visibility(len(query), table=mask, table_start=start, device=mask.device), None
    seen = ~(mask <= torch.finfo(mask.dtype).min / 2)  # NaN is no hidden token, and gives NaN
    visibility = Visibility(len(query), table=seen, table_start=start, device=mask.device)
    return visibility, mask.masked_fill(~seen, 0.0)


def _make_rule(
    query: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    position_bias: torch.Tensor | None,
    mask_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    start: int,
) -> ScoreRule:
    bias = position_bias if mask_bias is None else mask_bias
    if position_bias is not None and mask_bias is not None:
        bias = position_bias + mask_bias
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    bias, sinks = (None if each is None else each.detach().float() for each in (bias, sinks))
    return ScoreRule(scale, softcap, bias, start, sinks)


def _attend_tensors(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: RangeMask | torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    position_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor, None]:
    """Return the attention of a call without this cache: of an encoder, or of a model alone."""
    if softcap is None and sinks is None:
        if isinstance(mask, RangeMask):
            mask, is_causal = mask.in_memory(), False
        out, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
        )
        return out, None
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise PenstockError(
            f"{type(module).__name__} caps its scores or has attention sinks, through which "
            "penstock.kv's attention has no gradients; close the cache before training"
        )
    visibility, bias = _read_mask(module, query, key, mask, is_causal, 0)
    rule = _make_rule(query, scaling, softcap, position_bias, bias, sinks, 0)
    start = mask.start if isinstance(mask, RangeMask) else 0
    out = rule.weigh_down(*attend(query, key, value, rule, visibility, start))
    return out.to(query.dtype).transpose(1, 2).contiguous(), None
