"""Transformers' attention by `penstock.attention`: `attn_implementation="penstock"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.attention import blocksparse
from penstock.errors import PenstockError
from penstock.integrations.transformers._attention_mask import KeyRanges, make_key_ranges

NAME = "penstock"
_FEW_QUERIES = 16  # fewer are a fraction of a block

# Arguments of a model's call that do not change its attention, or are in its mask already.
_WITHOUT_EFFECT = {
    "cache_position",
    "is_causal",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "seq_idx",
    "token_type_ids",
    "use_cache",
}


def register_attention() -> None:
    """Make `attn_implementation="penstock"` known to Transformers, for models made or set later.

    Attention is then that of `penstock.attention.blocksparse`: packed documents (`position_ids`
    that begin anew, or `cu_seq_lens_q`), sliding windows, causal and bidirectional masks, padding,
    and grouped queries, in training too. Anything else that a model asks for is refused by name.

    Example:
        >>> register_attention()
        >>> model.set_attn_implementation("penstock")  # doctest: +SKIP
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend_blocks)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_key_ranges)


def attend_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: KeyRanges | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention `(B, n, Hq, value_dim)` as a model of Transformers asks for it.

    Args:
        module: The model's attention module.
        query: `(B, Hq, n, key_dim)`.
        key: `(B, H, tokens, key_dim)`.
        value: `(B, H, tokens, value_dim)`.
        attention_mask: Of `make_key_ranges`; None for a causal module, or one that sees all.
        dropout: Must be 0.
        scaling: Factor of the scores; None: 1 / sqrt(key_dim).
        sliding_window: The window that is in the mask.
        **kwargs: `cu_seq_lens_q` and `cu_seq_lens_k`, and arguments that change nothing.

    Raises:
        PenstockError: An argument that is not offered.
    """
    ranges = _read_mask(module, query, key, attention_mask, sliding_window, kwargs)
    offsets = _read_offsets(module, query, key, kwargs)
    _check_arguments(module, dropout, kwargs)
    if offsets is not None:
        ranges = ranges.within_documents(offsets)
    if query.shape[2] < _FEW_QUERIES:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=ranges.token_mask(), scale=scaling, enable_gqa=True
        )
    else:
        out = _attend(query, key, value, ranges, scaling)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ranges: KeyRanges, scaling: float | None
) -> Tensor:
    bias = None
    if ranges.shown is not None:
        zeros = torch.zeros(ranges.shown.shape, dtype=torch.float32, device=query.device)
        bias = zeros.masked_fill(~ranges.shown, -torch.inf)[:, None]
    if len(ranges.first_key) == 1:
        return blocksparse(query, key, value, ranges.layout, bias=bias, scale=scaling)
    batch = len(query)
    query, key, value = (_join_sequences(each) for each in (query, key, value))
    bias = None if bias is None else bias.flatten()
    out = blocksparse(query, key, value, ranges.layout, bias=bias, scale=scaling)
    return out.transpose(1, 2).unflatten(1, (batch, -1)).squeeze(0).transpose(1, 2)


def _join_sequences(tensor: Tensor) -> Tensor:
    """Return `(1, H, B * tokens, dim)`: no copy where a token's heads lie together."""
    return tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def _read_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: KeyRanges | Tensor | None,
    window: int | None,
    kwargs: dict[str, Any],
) -> KeyRanges:
    if isinstance(mask, KeyRanges):
        return mask
    name = type(module).__name__
    if mask is not None:
        raise PenstockError(
            f"{name} got an attention_mask of the shape {tuple(mask.shape)}; "
            "attn_implementation='penstock' takes one of (batch, tokens), or position_ids of "
            "packed documents: pass these, or use attn_implementation='sdpa'"
        )
    if window is not None:
        raise PenstockError(
            f"{name} has sliding_window={window} and no mask, from which "
            "attn_implementation='penstock' takes it; use attn_implementation='sdpa'"
        )
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    num_queries, num_keys = query.shape[2], key.shape[2]
    first = torch.zeros(1, num_queries, dtype=torch.int64, device=query.device)
    end = first + num_keys
    if is_causal and num_queries > 1:
        end = torch.arange(1, num_queries + 1, device=query.device)[None]
    return KeyRanges(first, end, num_keys, None)


def _read_offsets(
    module: torch.nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the first tokens of packed documents, where a collator passes them."""
    offsets, of_keys = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None)
    if offsets is None and of_keys is None:
        return None
    num_tokens = -1
    if offsets is not None and of_keys is not None and torch.equal(offsets, of_keys):
        num_tokens = int(offsets[-1])
    if len(query) != 1 or {query.shape[2], key.shape[2]} != {num_tokens}:
        raise PenstockError(
            f"{type(module).__name__} got cu_seq_lens_q and cu_seq_lens_k for a batch of "
            f"{len(query)}, {query.shape[2]} queries and {key.shape[2]} keys; "
            "attn_implementation='penstock' takes them where they are the same, for one row that "
            "they cover; use position_ids instead"
        )
    return offsets


def _check_arguments(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if dropout:
        raise PenstockError(
            f"{name} drops out attention weights with probability {dropout}, which "
            "attn_implementation='penstock' does not offer: set attention_dropout to 0 in the "
            "model's config, or use attn_implementation='sdpa'"
        )
    for argument, given in kwargs.items():
        if argument not in _WITHOUT_EFFECT and given is not None and given is not False:
            raise PenstockError(
                f"{name} passes {argument}= to its attention, which attn_implementation='penstock' "
                "does not offer; use attn_implementation='sdpa' or 'eager' for this model"
            )
