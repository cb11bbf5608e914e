"""Operator of attention over records by address on a GPU, with its checks."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kv._kernel import check_operands, expand_operand
from penstock.kv.triton._launch import RecordCall, attend

ALIGNMENT_BYTES = 16
"""Addresses that are multiples of it are read in wide words."""


def attend_records(
    query: Tensor,
    addresses: Tensor,
    counts: Tensor,
    *,
    block_tokens: int,
    value_dim: int,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    with_block_lse: bool = False,
    is_aligned: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend to records of keys and values that a GPU reads where they lie, by their addresses.

    Sums are float32; weights are rounded to the records' dtype before they multiply values. The
    keys of a head are cut into tasks by shapes alone, and tasks merged in their order: the result
    is the same bits in every run, on every device of a kind, and in every batch. A cut of the same
    records into several calls rounds otherwise.

    Arguments are those of `penstock.kv._kernel.attend_records`, but all tensors are on one GPU, the
    query has the records' dtype, addresses are of device memory or of registered host memory, and
    counts are not checked, as that would wait for the GPU: tokens beyond `block_tokens` are not
    read. `is_aligned` says that all addresses are multiples of `ALIGNMENT_BYTES`: reading is much
    slower where they are not, and faults where this is said of others.

    Returns:
        The output, its log-sum-exp, and that of each record or None, as there.

    Raises:
        TypeError: A tensor has a dtype that is not supported.
        ValueError: A shape does not fit, or a tensor is on another device than `query`.
    """
    dtype = query.dtype if dtype is None else dtype
    check_operands(query, addresses, counts, dtype, block_tokens, value_dim, device=query.device)
    if query.dtype != dtype:
        raise TypeError(
            f"query has the dtype {query.dtype} and records have {dtype}, but on a GPU both must "
            "have one: convert the query"
        )
    options = (block_tokens, value_dim, float(scale), float(softcap or 0.0))
    out, lse, block_lse = _attend_records(
        query, addresses, counts, *options, visible, bias, with_block_lse, is_aligned
    )
    return out, lse, block_lse if with_block_lse else None


@torch.library.custom_op("penstock::attend_records", mutates_args=())
def _attend_records(
    query: Tensor,
    addresses: Tensor,
    counts: Tensor,
    block_tokens: int,
    value_dim: int,
    scale: float,
    softcap: float,
    visible: Tensor | None,
    bias: Tensor | None,
    with_block_lse: bool,
    is_aligned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, num_tokens, _ = query.shape
    width, kv_heads = addresses.shape[2] * block_tokens, addresses.shape[1]
    seen = expand_operand(
        "visible", visible, (batch, kv_heads, num_tokens, width), unsqueeze=1, device=query.device
    )
    added = expand_operand(
        "bias", bias, (batch, heads, num_tokens, width), unsqueeze=0, device=query.device
    )
    call = RecordCall(
        query=query.contiguous(),
        addresses=addresses.contiguous(),
        counts=counts.contiguous(),
        block_tokens=block_tokens,
        value_dim=value_dim,
        scale=scale,
        softcap=softcap,
        visible=seen,
        bias=added,
        is_aligned=is_aligned,
    )
    return attend(call, with_block_lse=with_block_lse)


@_attend_records.register_fake
def _(query, addresses, counts, block_tokens, value_dim, *rest):  # noqa: ANN001, ANN002, ANN202
    shape, (*_, with_block_lse, _) = query.shape[:3], rest
    num_records = addresses.shape[2] if with_block_lse else 0
    sizes = ((*shape, value_dim), shape, (*shape, num_records))
    out, lse, block_lse = (query.new_empty(size, dtype=torch.float32) for size in sizes)
    return out, lse, block_lse
