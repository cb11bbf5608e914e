"""Layouts of the attention benchmark, its arms, and the peak memory of one long step."""

from __future__ import annotations

import dataclasses
import importlib.util
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.attention import Layout, blocksparse

OURS, MASKED, CAUSAL, FLEX = "penstock", "SDPA, mask", "SDPA, is_causal", "FlexAttention"
FLASH = "FlashAttention"  # on a GPU, where the package is installed
HEADS = 8
DOCUMENT_TOKENS = (300, 500)  # the lengths of documents lie between
PATTERNS = ("random 0.05", "random 0.25", "documents", "window", "bigbird", "causal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A shape and a layout.

    Attributes:
        pattern: One of PATTERNS.
        num_tokens: Queries, and keys.
        dim: Elements of a query, a key and a value.
    """

    pattern: str
    num_tokens: int
    dim: int

    @property
    def arms(self) -> tuple[str, ...]:
        if self.pattern != "causal":
            return OURS, MASKED
        has_flash = importlib.util.find_spec("flash_attn") is not None
        return (OURS, MASKED, CAUSAL, FLASH) if has_flash else (OURS, MASKED, CAUSAL)

    def bar(self, density: float) -> tuple[str, float] | None:
        """The arm that ours is held against, and the times that it should take at least."""
        is_long = self.num_tokens >= 4096
        if self.pattern == "causal":
            return CAUSAL, 1.1
        if self.pattern == "random 0.05":
            return MASKED, 10.0 if is_long else 8.0
        return (MASKED, 3.0 if is_long else 2.5) if density <= 0.25 else None

    def __str__(self) -> str:
        return f"layouts: {self.pattern}, {self.num_tokens} tokens, {HEADS} heads of {self.dim}"


def make_layout(pattern: str, num_tokens: int) -> Layout:
    """Return the layout of a pattern; random ones have a density that is exact in blocks."""
    num_blocks = -(-num_tokens // 64)
    if pattern == "causal":
        return Layout.causal(num_tokens)
    if pattern == "documents":
        return Layout.documents(document_lengths(num_tokens))
    if pattern == "window":
        return Layout.window(num_tokens, num_tokens // 16)
    if pattern == "bigbird":
        return Layout.bigbird(num_tokens)
    share = float(pattern.removeprefix("random "))
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, num_blocks, num_blocks, generator=generator)
    scores[0].fill_diagonal_(2.0)
    listed = scores.flatten().topk(round(share * num_blocks**2)).indices
    mask = torch.zeros(num_blocks**2, dtype=torch.bool)
    mask[listed] = True
    return Layout.from_blocks(mask.view(1, num_blocks, num_blocks))


def document_lengths(num_tokens: int) -> list[int]:
    """Return lengths of documents that fill a row; the last one may be shorter."""
    generator = torch.Generator().manual_seed(2)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(*DOCUMENT_TOKENS, (), generator=generator))))
    return lengths


def make_forwards(
    case: Case, layout: Layout, operands: tuple[Tensor, Tensor, Tensor], arms: tuple[str, ...]
) -> dict[str, Callable[[], Tensor]]:
    """Return the forward pass of each arm."""
    q, k, v = operands
    made: dict[str, Callable[[], Tensor]] = {OURS: lambda: blocksparse(q, k, v, layout)}
    if MASKED in arms:
        mask = layout.token_mask(case.num_tokens, case.num_tokens)[:, None]
        made[MASKED] = lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if CAUSAL in arms:
        made[CAUSAL] = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    if FLASH in arms:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        heads_second = [each.transpose(1, 2) for each in operands]
        made[FLASH] = lambda: flash_attn_func(*heads_second, causal=True).transpose(1, 2)
    if FLEX in arms:
        made[FLEX] = _flex_attention(layout, operands)
    return made


def _flex_attention(
    layout: Layout, operands: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Return FlexAttention, compiled, with a mask made of the layout's blocks and ranges."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_tokens = operands[0].shape[2]
    blocks, first, end = layout.block_mask()[0], layout.first_key, layout.end_key

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        listed = blocks[query // layout.block, key // layout.block]
        return listed & (first[query] <= key) & (key < end[query])

    device = operands[0].device.type
    mask = create_block_mask(sees, None, None, num_tokens, num_tokens, device=device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*operands, block_mask=mask)


def draw_operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v, which require gradients, and the gradient of the output.

    They are float32 on the CPU and bfloat16 on a GPU.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (4, 1, HEADS, case.num_tokens, case.dim)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = torch.randn(shape, generator=generator).to(device, dtype)
    for each in (q, k, v):
        each.requires_grad_()
    return q, k, v, dout


def peak_of_long_step(num_tokens: int, dim: int, share: float) -> tuple[float, int]:
    """Return seconds of a step, and the bytes by which it, with its operands, raised the peak."""
    layout = make_layout(f"random {share}", num_tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    q, k, v = (torch.randn(1, HEADS, num_tokens, dim, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, HEADS, num_tokens, dim)
    start = time.perf_counter()
    blocksparse(q, k, v, layout).backward(dout)
    seconds = time.perf_counter() - start
    return seconds, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
