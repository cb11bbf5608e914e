"""Block-sparse attention by torch: the way without kernels, and their oracle.

A query block is computed with all of its key blocks at once, so that the memory beside the operands
is that of one row of blocks. `attend` is the oracle: its gradients are those of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.attention._layout import Layout
from penstock.attention._operands import BlockOperands, empty_gradient, empty_results, sum_dtype


def forward(given: BlockOperands) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp of its scores.

        s_ij = scale q_i . k_j + bias_j    lse_i = log sum_j exp(s_ij)
        out_i = sum_j exp(s_ij - lse_i) v_j

    Returns:
        `(B, Hq, N, dv)` of the dtype of q, and `(B, Hq, N)`, float64 where q is and else float32.
        A query that sees nothing has the output 0 and the log-sum-exp -inf. The output lies in
        memory as `(B, N, Hq, dv)`.
    """
    q = given.q
    out, lse = empty_results(q, given.v)
    for head, rows, keys, visible in _rows_of(given):
        of_v, _, _, scores = _score(given, head, rows, keys)
        scores = scores.masked_fill(~visible, -torch.inf)
        of_rows = scores.logsumexp(-1, keepdim=True)
        weights = (scores - of_rows.masked_fill(of_rows == -torch.inf, 0.0)).exp()
        out[:, head, rows], lse[:, head, rows] = (weights @ of_v).to(q.dtype), of_rows[..., 0]
    return out, lse


def backward(
    dout: Tensor, given: BlockOperands, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias, in their shapes and dtypes.

    `dout` is the gradient of the output, `(B, Hq, N, dv)`, of any strides; `out` and `lse` are the
    results of `forward`. The gradient of the bias is contiguous; it is None where there is no bias.
    """
    q, k, v, _, bias, scale = given
    dtype = sum_dtype(q)
    dq, dk, dv = (empty_gradient(each, dtype).zero_() for each in (q, k, v))
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=q.device)
    # delta_i = sum_j P_ij dP_ij = dO_i . O_i;  dS = P (dP - delta), where dP = dO V'
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of queries that see nothing
    for head, rows, keys, visible in _rows_of(given):
        kv_head = head * k.shape[1] // q.shape[1]
        of_v, of_q, of_k, scores = _score(given, head, rows, keys)
        weights = (scores - lse[:, head, rows, None]).exp().masked_fill(~visible, 0.0)
        of_out = dout[:, head, rows].to(dtype)
        dscores = weights * (of_out @ of_v.mT - delta[:, head, rows, None])
        dq[:, head, rows] = scale * (dscores @ of_k)
        dk[:, kv_head].index_add_(1, keys, scale * (dscores.mT @ of_q))
        dv[:, kv_head].index_add_(1, keys, weights.mT @ of_out)
        if dbias is not None:
            dbias[:, head].index_add_(1, keys, dscores.sum(1))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, scale: float
) -> Tensor:
    """Return the attention that `forward` computes, with gradients by autograd, of any order.

    The graph keeps the weights of all listed blocks.
    """
    given = BlockOperands(q, k, v, layout, bias, scale)
    by_head: list[list[Tensor]] = [[] for _ in range(q.shape[1])]
    for head, rows, keys, visible in _rows_of(given):
        of_v, _, _, scores = _score(given, head, rows, keys)
        # A row without keys has scores of 0, and then no weights: no NaN has a gradient.
        hidden = ~visible | (scores == -torch.inf)
        has_keys = ~hidden.all(-1, keepdim=True)
        weights = scores.masked_fill(hidden, 0.0)
        weights = weights.masked_fill(hidden & has_keys, -torch.inf).softmax(-1)
        by_head[head].append(weights.masked_fill(hidden, 0.0) @ of_v)
    return torch.stack([torch.cat(each, 1) for each in by_head], 1).to(q.dtype)


def _rows_of(given: BlockOperands) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Return of each head and query block the queries, the keys, and which see which."""
    q, k, _, layout, *_ = given
    block, num_queries, num_keys = layout.block, q.shape[2], k.shape[2]
    offsets, token = layout.row_offsets.tolist(), torch.arange(block, device=q.device)
    for head in range(q.shape[1]):
        of_head = offsets[head % layout.num_heads]
        for row in range(layout.num_query_blocks):
            columns = layout.key_blocks[of_head[row] : of_head[row + 1]].long()
            keys = (columns[:, None] * block + token).flatten()
            keys = keys[keys < num_keys]
            rows = slice(row * block, min(row * block + block, num_queries))
            query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            visible = (layout.first_key[rows, None] <= keys) & (keys < layout.end_key[rows, None])
            yield head, rows, keys, visible & (query < layout.end_query[keys])


def _score(
    given: BlockOperands, head: int, rows: slice, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, queries and keys of one query block, in the dtype of sums, and the scores."""
    q, k, v, _, bias, scale = given
    dtype, kv_head = sum_dtype(q), head * k.shape[1] // q.shape[1]
    of_q = q[:, head, rows].to(dtype)
    of_k, of_v = (each[:, kv_head].index_select(1, keys).to(dtype) for each in (k, v))
    scores = scale * (of_q @ of_k.mT)
    if bias is not None:
        scores = scores + bias[:, head].index_select(1, keys).to(dtype)[:, None]
    return of_v, of_q, of_k, scores
