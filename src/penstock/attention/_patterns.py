"""Patterns: the masks of blocks and ranges of tokens that layouts are made from."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention._csr import UNBOUNDED, Ranges


def mask_ranges(
    mask: Tensor, block: int, num_queries: int | None, num_keys: int | None, causal: bool
) -> Ranges:
    """Return the ranges of a mask of blocks, in which tokens beyond the last ones see nothing."""
    _, num_rows, num_columns = mask.shape
    query = torch.arange(num_rows * block, dtype=torch.int32, device=mask.device)
    end_key = query + 1 if causal else torch.full_like(query, UNBOUNDED)
    if num_keys is not None:
        end_key = end_key.clamp(max=num_keys)
    if num_queries is not None:
        end_key[num_queries:] = 0
    end_query = query.new_full((num_columns * block,), UNBOUNDED)
    return Ranges(query * 0, end_key, end_query)


def pad_ranges(
    first_key: Tensor, end_key: Tensor, end_query: Tensor | None, num_keys: int, block: int
) -> Ranges:
    """Return ranges of whole blocks, in which tokens beyond the last ones see nothing."""
    num_queries = len(first_key)
    num_padded = -(-num_queries // block) * block
    padded_first, padded_end = first_key.new_zeros(2, num_padded, dtype=torch.int32)
    # Before they are clamped: narrow dtypes may not reach the number of tokens.
    padded_first[:num_queries] = first_key.long().clamp(min=0, max=num_keys)
    padded_end[:num_queries] = end_key.long().clamp(min=0, max=num_keys)
    num_padded = -(-num_keys // block) * block
    padded_query = first_key.new_full((num_padded,), UNBOUNDED, dtype=torch.int32)
    if end_query is not None:
        padded_query[:num_keys] = end_query.long().clamp(min=0, max=num_queries)
    return Ranges(padded_first, padded_end, padded_query)


def document_ranges(lengths: Tensor, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the first keys and the ends of keys of packed documents."""
    ends = lengths.cumsum(0)
    first = (ends - lengths).repeat_interleave(lengths)
    query = torch.arange(len(first), device=lengths.device)
    end = query + 1 if causal else ends.repeat_interleave(lengths)
    if window is not None:
        first = torch.maximum(first, query - window + 1)
        end = torch.minimum(end, query + window)
    return first, end


def strided_mask(num_blocks: int, local_blocks: int, stride: int) -> Tensor:
    """Return near blocks and every `stride`-th one, bool `(blocks, blocks)`."""
    number = torch.arange(num_blocks, device="cpu")
    is_near = (number[:, None] - number).abs() < local_blocks
    return is_near | (number % stride == stride - 1)


def bigbird_mask(
    shape: tuple[int, int, int], numbers: tuple[int, int, int], seed: int, *, causal: bool
) -> Tensor:
    """Return global, near and random blocks, bool `(heads, blocks, blocks)`."""
    num_global, num_near, num_random = numbers
    if num_near < 1 or num_near % 2 == 0:
        raise ValueError(f"window_blocks is {num_near}, but must be odd and positive")
    number = torch.arange(shape[1], device="cpu")
    distance = number[:, None] - number
    mask = (distance.abs() <= num_near // 2) | (number < num_global)
    mask |= number[:, None] < num_global
    mask &= distance >= 0 if causal else torch.ones_like(mask)
    # Blocks that are listed already, or come after a causal query, are drawn last and not added.
    free = ~mask & (distance > 0 if causal else torch.ones_like(mask))
    draws = torch.rand(
        shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    drawn = best_mask(draws.masked_fill(~free, -1.0), num_random, causal=False)
    return mask | (drawn & free)


def best_mask(scores: Tensor, num_best: int, causal: bool) -> Tensor:
    """Return the highest scores of each row, bool; the diagonal is the best where it is causal."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    ahead = torch.ones_like(mask[0]).triu(1) & causal
    if causal:
        scores = scores.masked_fill(ahead, -torch.inf)
        scores.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    is_none = scores.isnan()
    if bool(is_none.any()):
        raise ValueError(
            f"scores are NaN at {is_none.nonzero()[0].tolist()} (head, query block, key block) and "
            f"at {int(is_none.sum()) - 1} other places, where no block is better than another: "
            "pass scores.nan_to_num(-torch.inf), if those are to be the last"
        )
    best = scores.topk(min(num_best, scores.shape[2]), dim=2).indices
    mask.scatter_(2, best, True)
    return mask & ~ahead


def descendant_ends(parents: Tensor) -> Tensor:
    """Return the end of each token's descendants, which follow it in depth-first order."""
    numbers = parents.tolist()
    path: list[int] = []  # from a root to the last token
    ends = list(range(1, len(numbers) + 1))
    for token, parent in enumerate(numbers):
        while path and path[-1] != parent:
            ends[path.pop()] = token
        if not path and parent != -1:
            raise ValueError(
                f"the parent of token {token} is {parent}, which is neither the token before it "
                "nor one of that token's ancestors: put the tokens in depth-first order"
            )
        path.append(token)
    for token in path:
        ends[token] = len(numbers)
    return torch.tensor(ends, device=parents.device)
