"""Attention of any number of queries over a part of the keys, and the merge of such parts.

With scores s of a part, the partial result is o = sum exp(s - l) v with l = log sum exp(s). Parts
merge exactly (Milakov and Gimelshein, arXiv:1805.02867; Rabe and Staats, arXiv:2112.05682):
l = log(exp(l1) + exp(l2)), o = exp(l1 - l) o1 + exp(l2 - l) o2. A query that no key of a part is
visible to has l = -inf and o = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.compat.attention import flash_attention, has_flash_attention

_SCORE_BYTES = 4 * 2**20  # of the scores that are held at once


@dataclass(frozen=True)
class ScoreRule:
    """Scores from products: scale them, cap them, add a bias.

    Attributes:
        scale: Factor of query times key.
        softcap: c of c tanh(s / c); None: no capping.
        bias: `(1 or B, 1 or Hq, n, tokens)`, added to the scores; None: nothing.
        bias_start: Token that the first column of `bias` belongs to.
        sinks: float32 `(Hq,)`: score of one key more of each query head, whose value is 0; None:
            there is none.
    """

    scale: float
    softcap: float | None = None
    bias: torch.Tensor | None = None
    bias_start: int = 0
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True where the scores of tokens are scaled products."""
        return self.softcap is None and self.bias is None

    def bias_between(self, first: int, last: int, queries: slice) -> torch.Tensor | None:
        """Return the bias of some queries and of the keys `[first, last)`."""
        if self.bias is None:
            return None
        return self.bias[:, :, queries, first - self.bias_start : last - self.bias_start]

    def weigh_down(self, tensor: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Multiply by the share of the weights that the sinks leave to the tokens.

        With l the log-sum-exp of the tokens and s the score of a sink it is
        exp(l) / (exp(l) + exp(s)).

        Args:
            tensor: `(B, Hq, n, ...)`: their result, or shares in it.
            lse: `(B, Hq, n)`, over all tokens.
        """
        if self.sinks is None:
            return tensor
        return tensor * (lse - self.sinks.to(lse.dtype)[:, None]).sigmoid().unsqueeze(-1)


def score(
    query: torch.Tensor,
    keys: torch.Tensor,
    rule: ScoreRule,
    bias: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return scores; -inf where a key is hidden.

    Args:
        query: `(B, Hq, n, dk)`.
        keys: `(B, H, m, dk)` where H divides Hq.
        rule: Scale and capping; its bias is not looked at.
        bias: `(1 or B, 1 or Hq, n, m)`.
        visible: bool `(1 or B, 1 or Hq, 1 or n, m)`.

    Returns:
        `(B, H, Hq / H, n, m)` in float32, or in float64 where the query is.
    """
    B, Hq, n, dk = query.shape
    H, m = keys.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.reshape(B, H, Hq // H * n, dk).to(dtype)
    scores = (rows @ keys.to(dtype).transpose(2, 3)).mul_(rule.scale)
    scores = scores.view(B, H, Hq // H, n, m)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if bias is not None:
        scores += _by_group(bias, H)
    if visible is not None:
        scores.masked_fill_(~_by_group(visible, H), -math.inf)
    return scores


def weigh(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return partial results of scores `(B, H, G, n, m)` and values `(B, H, m, dv)`.

    Returns:
        The results `(B, Hq, n, dv)` and the log-sum-exps `(B, Hq, n)`, in the scores' dtype.
    """
    B, H, G, n, m = scores.shape
    lse = scores.logsumexp(-1)
    # A row without a visible key: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN.
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    out = weights.view(B, H, G * n, m) @ values.to(scores.dtype)
    return out.view(B, H * G, n, -1), lse.view(B, H * G, n)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results in their order.

    Example:
        >>> q, k, v = (torch.rand(1, 2, n, 4) for n in (1, 6, 6))
        >>> rule = ScoreRule(0.5)
        >>> parts = [weigh(score(q, k[:, :, s], rule), v[:, :, s]) for s in (slice(4), slice(4, 6))]
        >>> whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> bool(torch.allclose(merge(parts)[0], whole, atol=1e-6))
        True

    Args:
        parts: Pairs of results `(..., dv)` and log-sum-exps `(...)`; at least one.

    Returns:
        Result and log-sum-exp over the keys of all parts.
    """
    out, lse = parts[0]
    for part_out, part_lse in parts[1:]:
        whole = torch.logaddexp(lse, part_lse)
        base = whole.masked_fill(whole == -math.inf, 0.0)
        out = out * (lse - base).exp().unsqueeze(-1)
        out = out + part_out * (part_lse - base).exp().unsqueeze(-1)
        lse = whole
    return out, lse


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: ScoreRule,
    visibility: Any,
    first_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the partial result of queries over keys, in chunks whose scores fit a few MiB.

    The query is `(B, Hq, n, dk)`; keys and values `(B, H, m, dk)` and `(B, H, m, dv)` are those of
    the tokens from `first_key` on; `visibility` is a `Visibility`.

    Returns:
        The result `(B, Hq, n, dv)` and its log-sum-exp `(B, Hq, n)`, in float32 or float64.
    """
    num_queries, num_keys = query.shape[2], keys.shape[2]
    end = first_key + num_keys
    if rule.is_plain and num_queries > 1 and has_flash_attention(query, keys, values):
        if visibility.sees_all(first_key, end):
            return _flash(query, keys, values, rule.scale, is_causal=False)
        if visibility.is_triangle(first_key, end, num_queries):
            return _flash(query, keys, values, rule.scale, is_causal=True)
    rows, columns = _chunk_shape(query.shape[0] * query.shape[1], num_queries, num_keys)
    wholes = []
    for i in range(0, num_queries, rows):
        some = slice(i, min(i + rows, num_queries))
        parts = []
        for j in range(0, num_keys, columns):
            first, last = first_key + j, min(first_key + j + columns, end)
            visible = visibility.between(some, first, last)
            if visible is None or visible.any():
                bias = rule.bias_between(first, last, some)
                scores = score(query[:, :, some], keys[:, :, j : j + columns], rule, bias, visible)
                parts.append(weigh(scores, values[:, :, j : j + columns]))
        wholes.append(merge(parts) if parts else nothing(query[:, :, some], values.shape[3]))
    outs, lses = zip(*wholes, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def nothing(query: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the partial result over no keys."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((*query.shape[:3], value_dim), dtype=dtype)
    return out, query.new_full(query.shape[:3], -math.inf, dtype=dtype)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute without holding scores, by torch's kernel."""
    B, Hq, n, dk = query.shape
    H = keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((B, H, Hq // H, n, dk), dtype=dtype)
    lse = query.new_empty((B, H, Hq // H, n), dtype=dtype)
    grouped = query.view(B, H, Hq // H, n, dk)
    for g in range(Hq // H):
        # The kernel wants as many heads of keys as of queries: one query of each group at a time.
        out[:, :, g], lse[:, :, g] = flash_attention(
            grouped[:, :, g], keys, values, scale, is_causal=is_causal
        )
    return out.view(B, Hq, n, dk), lse.view(B, Hq, n)


def _chunk_shape(num_rows: int, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return numbers of queries and keys whose scores, of all batches and heads, fit."""
    num_scores = max(1, _SCORE_BYTES // 4 // num_rows)
    columns = min(num_keys, max(64, num_scores // 64))
    return max(1, min(num_queries, num_scores // columns)), columns


def _by_group(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """View `(B, 1 or Hq, n, m)` as `(B, 1 or H, 1 or G, n, m)`."""
    heads = tensor.shape[1]
    return tensor.unsqueeze(1) if heads == 1 else tensor.unflatten(1, (num_heads, -1))
