"""Attention of few tokens over records of keys and values where they lie, by address, on the CPU.

The work is done in C++ (`attention.cpp`), which reads each record once for all query heads that
share it. Without a compiler torch does it, a KV head after the other.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.codegen import THREADS, VECTORS, load_optional_library
from penstock.kv._partial import merge
from penstock.memory.raw_memory import copy_bytes

_CPU = torch.device("cpu")
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_pack_call = struct.Struct("8P17q2d").pack  # `struct Call` of `attention.cpp`


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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend to records of keys and values in RAM, given by their addresses.

    Sums are float32. The result does not depend on the number of threads, which is torch's.

    Example:
        >>> record = torch.ones(2 * 64 * 8)  # 64 keys of 8 elements, then 64 values
        >>> address = torch.tensor([[[record.data_ptr()]]])
        >>> count = torch.tensor([[[64]]], dtype=torch.int32)
        >>> out, lse, _ = attend_records(
        ...     torch.ones(1, 4, 1, 8), address, count, block_tokens=64, value_dim=8, scale=0.5
        ... )
        >>> tuple(out.shape), round(float(lse[0, 0, 0]), 4)  # 0.5 * 8 + log 64
        ((1, 4, 1, 8), 8.1589)

    Args:
        query: Shape `(B, Hq, n, dk)`, any floating dtype; query heads `h * G` to `h * G + G` share
            KV head `h`.
        addresses: int64 `(B, H, k)`: the first byte of each record, `block_tokens` keys of `dk`
            elements and then as many values of `value_dim`. The records stay alive, and unchanged,
            until the call returns.
        counts: int32 `(B, H, k)`: tokens that are valid in each record, 0 to `block_tokens`. The
            others are not read.
        block_tokens: Tokens of a record.
        value_dim: Elements of a value.
        scale: Factor of the products of queries and keys.
        softcap: c of c * tanh(score / c); None for none.
        visible: bool `(B, n, k * block_tokens)`, or `(B, H, n, k * block_tokens)` where it differs
            by KV head: whether a token may be seen; None for all.
        bias: Added to the scores: `(Hq, n, k * block_tokens)`, or `(B, Hq, n, k * block_tokens)`.
        dtype: Of the records: float32, float16 or bfloat16; None for that of `query`.
        with_block_lse: Whether the log-sum-exp of each record is wanted.

    Returns:
        The output, float32 `(B, Hq, n, value_dim)`, zero where nothing is visible; its log-sum-exp
        of scores, float32 `(B, Hq, n)`, -inf where nothing is visible; and that of each record,
        `(B, Hq, n, k)`, or None. The last is -inf where a record's share is below 1e-37.

    Raises:
        TypeError: A tensor has a dtype that is not supported.
        ValueError: A shape does not fit, a count is out of range, or a tensor is not on the CPU.
    """
    dtype = query.dtype if dtype is None else dtype
    check_operands(query, addresses, counts, dtype, block_tokens, value_dim, device=_CPU)
    batch, heads, num_tokens, _ = query.shape
    width = addresses.shape[2] * block_tokens
    shape = (batch, addresses.shape[1], num_tokens, width)
    visible = expand_operand("visible", visible, shape, unsqueeze=1, device=_CPU)
    shape = (batch, heads, num_tokens, width)
    bias = expand_operand("bias", bias, shape, unsqueeze=0, device=_CPU)
    bias = None if bias is None else bias.detach().float()
    call = RecordAttention(query.detach(), dtype, block_tokens, value_dim, scale, softcap)
    block_lse = call.add(addresses, counts, visible, bias, with_block_lse=with_block_lse)
    return call.out, call.lse, block_lse


class RecordAttention:
    """Attention of few tokens over records that come part by part; parts are added in their order.

    Its operands are those of `attend_records`, and taken as they are.

    Attributes:
        out: The output over the records so far, float32 `(B, Hq, n, value_dim)`.
        lse: Its log-sum-exp of scores, float32 `(B, Hq, n)`.
        has_parts: Whether there were any; before, `out` and `lse` hold nothing.
    """

    def __init__(
        self,
        query: Tensor,
        dtype: torch.dtype,
        block_tokens: int,
        value_dim: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._query, self._query_shape = query.float().contiguous(), (*query.shape,)
        self._value_dim = value_dim
        self._kind, self._dtype = _KINDS[dtype], dtype
        self._block_tokens = block_tokens
        self._scale, self._softcap = scale, softcap or 0.0
        self.out = self._query.new_empty((*self._query_shape[:3], value_dim))
        self.lse = self._query.new_empty(self._query_shape[:3])
        self.has_parts = False
        self._pointers = self.out.data_ptr(), self.lse.data_ptr()

    def add(
        self,
        addresses: Tensor,
        counts: Tensor,
        visible: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        first_token: int = 0,
        with_block_lse: bool = False,
    ) -> Tensor | None:
        """Attend to further records, by torch's threads; `visible` and `bias` from a token on.

        Returns:
            The log-sum-exps of each record, where they are wanted.

        Raises:
            ValueError: A count is out of range.
        """
        addresses, counts = addresses.contiguous(), counts.contiguous()
        block_lse = (
            torch.empty(*self.lse.shape, addresses.shape[2], dtype=torch.float32, device="cpu")
            if with_block_lse
            else None
        )
        if self.out.numel() > 0:
            library = _library()
            call = (addresses, counts, visible, bias, block_lse)
            if library is None:
                _check_counts(counts, self._block_tokens)
                self._add_by_torch(*call, first_token)
            elif not library.penstock_attend_records(self._pack(*call, first_token)):
                _check_counts(counts, self._block_tokens)
            self.has_parts = True
        return block_lse

    def _pack(
        self,
        addresses: Tensor,
        counts: Tensor,
        visible: Tensor | None,
        bias: Tensor | None,
        block_lse: Tensor | None,
        first_token: int,
    ) -> bytes:
        batch, heads, num_tokens, key_dim = self._query_shape
        _, kv_heads, num_records = addresses.shape
        return _pack_call(
            *(self._query.data_ptr(), addresses.data_ptr(), counts.data_ptr()),
            *(_pointer(visible, first_token), _pointer(bias, first_token)),
            *(*self._pointers, _pointer(block_lse)),
            *(batch, kv_heads, heads // kv_heads * num_tokens, num_tokens),
            *(num_records, self._block_tokens, key_dim, self._value_dim),
            *(self._kind, torch.get_num_threads(), self.has_parts),
            *((0, 0, 0) if visible is None else visible.stride()[:3]),
            *((0, 0, 0) if bias is None else bias.stride()[:3]),
            *(self._scale, self._softcap),
        )

    def _add_by_torch(
        self,
        addresses: Tensor,
        counts: Tensor,
        visible: Tensor | None,
        bias: Tensor | None,
        block_lse: Tensor | None,
        first_token: int,
    ) -> None:
        """Add the part of some records by torch, a KV head after the other."""
        num_tokens = counts.shape[2] * self._block_tokens
        visible, bias = (
            None if each is None else each.narrow(-1, first_token, num_tokens)
            for each in (visible, bias)
        )
        parts = [(self.out.clone(), self.lse.clone())] if self.has_parts else []
        call = (self._scale, self._softcap, visible, bias)
        results = (self.out, self.lse, block_lse)
        _attend_by_torch(
            self._query, addresses, counts, self._dtype, self._block_tokens, call, results
        )
        if parts:
            out, lse = merge([*parts, (self.out, self.lse)])
            self.out.copy_(out)
            self.lse.copy_(lse)


def copy_pieces(destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
    """Copy pieces of memory of one length between addresses, int64 each; none overlap.

    Example:
        >>> source, copy = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        >>> to, at = (np.array([t.data_ptr(), t.data_ptr() + 16]) for t in (copy, source))
        >>> copy_pieces(to, at, 16)
        >>> copy.tolist()
        [0, 1, 2, 3]
    """
    library = _library()
    if library is None:
        for destination, source in zip(destinations.tolist(), sources.tolist(), strict=True):
            copy_bytes(destination, source, num_bytes)
        return
    destinations, sources = (
        np.ascontiguousarray(each, dtype=np.int64) for each in (destinations, sources)
    )
    assert len(destinations) == len(sources)
    library.penstock_copy_pieces(
        *(destinations.ctypes.data, sources.ctypes.data),
        *(num_bytes, len(sources), torch.get_num_threads()),
    )


def check_operands(
    query: Tensor,
    addresses: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    block_tokens: int,
    value_dim: int,
    *,
    device: torch.device,
) -> None:
    """Refuse operands whose memory could not be read as it is."""
    if dtype not in _KINDS or not query.is_floating_point():
        raise TypeError(
            f"query has the dtype {query.dtype} and records have {dtype}, but records must be "
            "float32, float16 or bfloat16: convert them, or pass their dtype"
        )
    if addresses.dtype != torch.int64 or counts.dtype != torch.int32:
        raise TypeError(
            f"addresses have the dtype {addresses.dtype} and counts {counts.dtype}, but must have "
            "int64 and int32"
        )
    devices = {each.device for each in (query, addresses, counts)}
    if devices != {device}:
        names = sorted(map(str, devices))
        raise ValueError(f"operands are on {names}, but must be on {_name_of(device)}")
    if query.dim() != 4 or addresses.dim() != 3 or counts.shape != addresses.shape:
        raise ValueError(
            f"query has the shape {tuple(query.shape)}, addresses {tuple(addresses.shape)} and "
            f"counts {tuple(counts.shape)}, but must have (B, Hq, n, dk), (B, H, k) and (B, H, k)"
        )
    _check_lengths(query, addresses, block_tokens, value_dim)


def _check_lengths(query: Tensor, addresses: Tensor, block_tokens: int, value_dim: int) -> None:
    batch, heads = query.shape[:2]
    if addresses.shape[0] != batch or heads % max(addresses.shape[1], 1):
        raise ValueError(
            f"query has {heads} heads in a batch of {batch}, which must be a multiple of the KV "
            f"heads in the same batch; addresses have the shape {tuple(addresses.shape)}"
        )
    if (
        block_tokens < 1
        or value_dim < 1
        or query.shape[3] < 1
        or (heads and not addresses.shape[1])
    ):
        raise ValueError(
            f"block_tokens is {block_tokens}, value_dim {value_dim} and the shape of query "
            f"{tuple(query.shape)}, with {addresses.shape[1]} KV heads: all must be at least 1"
        )


def _check_counts(counts: Tensor, block_tokens: int) -> None:
    if counts.numel() > 0:
        least, most = (int(each) for each in torch.aminmax(counts))
        if least < 0 or most > block_tokens:
            raise ValueError(
                f"counts are between {least} and {most}, but must be from 0 to block_tokens, "
                f"{block_tokens}"
            )


def expand_operand(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    *,
    unsqueeze: int,
    device: torch.device,
) -> Tensor | None:
    """Return `visible` or `bias` with one element per score, tokens one after the other.

    It is copied only where tokens lie apart.
    """
    if tensor is None:
        return None
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {_name_of(device)}")
    if name == "visible" and tensor.dtype != torch.bool:
        raise TypeError(f"visible has the dtype {tensor.dtype}, but must be bool")
    full = tensor.unsqueeze(unsqueeze) if tensor.dim() == 3 else tensor
    try:
        full = full.expand(shape)
    except RuntimeError:
        fewer = (*shape[:unsqueeze], *shape[unsqueeze + 1 :])
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, but must have {fewer} or {shape}"
        ) from None
    return full if full.stride(-1) == 1 else full.contiguous()


def _name_of(device: torch.device) -> str:
    return "the CPU" if device == _CPU else str(device)


def _pointer(tensor: Tensor | None, first: int = 0) -> int:
    """Return the address of an element of the last dimension, the first one in all others."""
    return 0 if tensor is None else tensor.data_ptr() + first * tensor.itemsize


def _attend_by_torch(
    query: Tensor,
    addresses: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    block_tokens: int,
    call: tuple[float, float, Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Write the results of `attend_records`, computed by torch."""
    (scale, softcap, visible, bias), (out, lse, block_lse) = call, results
    batch, kv_heads, num_records = addresses.shape
    group = query.shape[1] // kv_heads
    token = torch.arange(block_tokens, device="cpu")
    for b in range(batch):
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            keys, values = _read_records(
                addresses[b, h], counts[b, h], dtype, block_tokens, query.shape[3], out.shape[3]
            )
            scores = scale * query[b, heads] @ keys.t()
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[b, heads]
            is_valid = (token < counts[b, h][:, None]).flatten()
            is_seen = is_valid if visible is None else is_valid & visible[b, h]
            scores = scores.masked_fill(~is_seen, -torch.inf)
            total = scores.logsumexp(-1, keepdim=True)
            weights = (scores - total.masked_fill(total == -torch.inf, 0.0)).exp()
            out[b, heads] = weights @ values
            lse[b, heads] = total[..., 0]
            if block_lse is not None:
                blocks = scores.unflatten(-1, (num_records, block_tokens))
                block_lse[b, heads] = blocks.logsumexp(-1)


def _read_records(
    addresses: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    block_tokens: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """Return keys and values of records one after the other, zero beyond their counts."""
    keys = torch.zeros(len(addresses), block_tokens, key_dim, dtype=torch.float32, device="cpu")
    values = torch.zeros(len(addresses), block_tokens, value_dim, dtype=torch.float32, device="cpu")
    for i, (address, count) in enumerate(zip(addresses.tolist(), counts.tolist(), strict=True)):
        first = address + block_tokens * key_dim * dtype.itemsize
        for to, start in ((keys, address), (values, first)):
            num_bytes = count * to.shape[2] * dtype.itemsize
            if num_bytes > 0:
                memory = (ctypes.c_char * num_bytes).from_address(start)
                to[i, :count] = torch.frombuffer(memory, dtype=dtype).view(count, -1)
    return keys.flatten(0, 1), values.flatten(0, 1)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "kv_attention",
        [THREADS, VECTORS, Path(__file__).with_name("attention.cpp")],
        flags=("-O3", "-march=native"),
        functions={
            "penstock_attend_records": (ctypes.c_int, [ctypes.c_char_p]),
            "penstock_copy_pieces": (None, [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3),
        },
        work="attention over records of a KV cache is computed",
        otherwise="by torch, slower",
    )
