"""Layouts of every kind with masks of tokens that are made another way, and operands for them."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.attention import Layout


@dataclasses.dataclass
class Pattern:
    """A layout, and the pairs that it should have, bool `(heads, queries, keys)`."""

    layout: Layout
    mask: Tensor

    @property
    def num_queries(self) -> int:
        return self.mask.shape[1]


def grid(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(num_queries)[:, None], torch.arange(num_keys)


def causal(num_tokens: int, block: int) -> Pattern:
    query, key = grid(num_tokens, num_tokens)
    return Pattern(Layout.causal(num_tokens, block), (key <= query)[None])


def documents(lengths: list[int], block: int, causal: bool, window: int | None) -> Pattern:
    query, key = grid(sum(lengths), sum(lengths))
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = number[query] == number[key]
    if causal:
        mask &= key <= query
    if window is not None:
        mask &= (query - key).abs() < window
    return Pattern(Layout.documents(lengths, block, causal=causal, window=window), mask[None])


def blocks(
    seed: int, heads: int, num_queries: int, num_keys: int, block: int, share: float, causal: bool
) -> Pattern:
    """Random blocks, so that some rows and columns are empty."""
    query, key = grid(num_queries, num_keys)
    shape = (heads, -(-num_queries // block), -(-num_keys // block))
    listed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    mask = listed[:, query // block, key // block]
    layout = Layout.from_blocks(listed, block, causal=causal)
    return Pattern(layout, mask & (key <= query) if causal else mask)


def tree(seed: int, num_tokens: int, block: int) -> Pattern:
    generator = torch.Generator().manual_seed(seed)
    parents, path = [-1], [0]
    mask = torch.eye(num_tokens, dtype=torch.bool)
    for token in range(1, num_tokens):
        keep = int(torch.randint(-1, len(path), (), generator=generator))
        path = path[: len(path) - max(0, keep)] if keep < len(path) else []
        parents.append(path[-1] if path else -1)
        mask[token, path] = True
        path.append(token)
    return Pattern(Layout.tree(parents, block), mask[None])


@st.composite
def patterns(draw: st.DrawFn, most_tokens: int = 150) -> Pattern:
    """Layouts of every kind, up to some tokens, with 1 or 4 heads."""
    block = draw(st.sampled_from([16, 32, 64, 128]))
    num_tokens = draw(st.integers(1, most_tokens))
    seed = draw(st.integers(0, 99))
    kind = draw(st.sampled_from(["causal", "documents", "blocks", "tree", "strided", "bigbird"]))
    is_causal = draw(st.booleans())
    if kind == "causal":
        return causal(num_tokens, block)
    if kind == "documents":
        lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
        window = draw(st.none() | st.integers(1, 40))
        return documents(lengths, block, is_causal, window)
    if kind == "blocks":
        num_keys = draw(st.integers(1, most_tokens))
        share = draw(st.sampled_from([0.0, 0.3, 0.8]))
        heads = draw(st.sampled_from([1, 4]))
        return blocks(seed, heads, num_tokens, num_keys, block, share, is_causal)
    if kind == "tree":
        return tree(seed, num_tokens, block)
    layout = (
        Layout.strided(num_tokens, block, local_blocks=1, stride=2, causal=is_causal)
        if kind == "strided"
        else Layout.bigbird(num_tokens, block, heads=4, seed=seed, causal=is_causal)
    )
    query, key = grid(num_tokens, num_tokens)
    mask = layout.block_mask()[:, query // block, key // block]
    return Pattern(layout, mask & (key <= query) if is_causal else mask)


def operands(
    pattern: Pattern,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    """Return q, k, v and perhaps a bias, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    _, num_queries, num_keys = pattern.mask.shape
    shapes = [
        (batch, heads, num_queries, dim),
        (batch, kv_heads, num_keys, dim),
        (batch, kv_heads, num_keys, dim if value_dim is None else value_dim),
        *([(batch, heads, num_keys)] if has_bias else []),
    ]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(dtype).requires_grad_() for each in drawn]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, scale: float
) -> Tensor:
    """Attention by its definition, with all scores in memory."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * (q @ k.mT)
    if bias is not None:
        scores = scores + bias[:, :, None]
    scores = scores.masked_fill(~mask & mask.any(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1).masked_fill(~mask, 0.0) @ v


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected, which has a floor.

    A query with one key has a gradient of exactly 0, the difference of two equal numbers near 1.
    """
    difference = (found.double() - expected.double()).norm()
    floor = 0.1 * expected.numel() ** 0.5
    return float(difference / expected.double().norm().clamp(min=floor))
