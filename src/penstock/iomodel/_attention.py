"""Attention: FlashAttention's regime above d^2 elements of fast memory, two passes below.

With rows of queries that stay beside their output (FlashAttention-2's order of loops, arXiv:
2307.08691), K and V pass by once for each tile of queries: O(N^2 d^2 / M) elements. With the scores
in the slow memory two tiled products move O(N^2 d / sqrt(M)), which is less for M < d^2 (Saha and
Ye, arXiv:2402.07443). A block-sparse layout has `density` times the pairs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from penstock.codegen import ceil_div
from penstock.iomodel._bounds import ATTENTION_BOUND, attention_bound
from penstock.iomodel._levels import (
    FastMemory,
    IOModel,
    TiledSchedule,
    check_amounts,
    check_counts,
    model_levels,
    tile_lengths,
)

Pass = Literal["forward", "backward"]
LEAST_ELEMENTS = {"forward": 6, "backward": 8}
_FLASH, _TWO_PASS = "FlashAttention", "two-pass"


def attention(
    tokens: int,
    head_dim: int,
    fast_memory: FastMemory,
    density: float = 1,
    pass_: Pass = "forward",
    *,
    element_bytes: int = 4,
) -> IOModel:
    """Model the attention of one head: bytes, tiles and regime, and the lower bound.

    Example:
        >>> attention(8192, 64, "100KiB").regime, attention(8192, 128, "16KiB").regime
        ('FlashAttention', 'two-pass')

    Args:
        tokens: N, queries and keys.
        head_dim: d, of queries, keys and values.
        fast_memory: Bytes of the fast memory, or a machine: a size for each level.
        density: Share of the pairs of a query and a key that a layout keeps, above 0 and at most 1;
            each query has `ceil(density * tokens)` keys.
        pass_: `"forward"`; or `"backward"`, which gets q, k, v, the output, its gradient and the
            logarithms of the softmaxes' sums.
        element_bytes: Bytes of an element of all matrices, and of a sum.

    Returns:
        The bytes by level, in the two-level model: what the fast memory loads and stores.

    Raises:
        TypeError: A length is no integer, or `fast_memory` is no size.
        ValueError: A length is below 1, `density` or `pass_` is none of these, or the fast memory
            holds no tile of one element.
    """
    of = _Attention(tokens, head_dim, density, pass_)
    least = LEAST_ELEMENTS[pass_]
    levels = model_levels(fast_memory, element_bytes, of.choose, of.bound, least)
    return IOModel(str(of), levels, ATTENTION_BOUND)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention of one head, whose numbers are checked."""

    tokens: int
    head_dim: int
    density: float
    pass_: Pass

    def __post_init__(self) -> None:
        check_counts(tokens=self.tokens, head_dim=self.head_dim)
        check_amounts(above=True, density=self.density)
        if self.density > 1:
            raise ValueError(f"density is {self.density}; pass a share above 0 and at most 1")
        if self.pass_ not in LEAST_ELEMENTS:
            raise ValueError(f"pass_ is {self.pass_!r}; pass 'forward' or 'backward'")

    def __str__(self) -> str:
        shape = f"{self.tokens} tokens, head dim {self.head_dim}, density {self.density:g}"
        return f"attention {self.pass_}, {shape}"

    @property
    def keys(self) -> int:
        """Keys of a query."""
        return min(self.tokens, math.ceil(self.density * self.tokens))

    def bound(self, elements: int) -> int:
        """Return the elements that move at least through so many."""
        # q and o, k and v; or q, do and dq, k, v, dk and dv: D = rowsum(P dP), too, without o
        of_query, of_key = (2, 2) if self.pass_ == "forward" else (3, 4)
        compulsory = (of_query * self.tokens + of_key * self.keys) * self.head_dim
        scores = self.tokens * self.keys
        return max(compulsory, attention_bound(scores, self.head_dim, elements))

    def choose(self, elements: int) -> TiledSchedule:
        """Return the schedule that moves the fewest elements through so many."""
        found = [
            schedule
            for of_pass in _SCHEDULES[self.pass_]
            if (schedule := of_pass(self.tokens, self.keys, self.head_dim, elements)) is not None
        ]
        return min(found, key=lambda each: each.moved)


def flash_forward(tokens: int, keys: int, head_dim: int, elements: int) -> TiledSchedule | None:
    """Return FlashAttention's schedule; None where not one row of queries fits.

    Rows of q and o, with a maximum, a sum and a score each, stay; then a row of k, and one of v,
    is at hand: B (2d + 3) + d <= M.
    """
    most = min(tokens, (elements - head_dim) // (2 * head_dim + 3))
    if most < 1:
        return None
    tiles = ceil_div(tokens, most)
    return TiledSchedule(
        regime=_FLASH,
        tiles={"queries": ceil_div(tokens, tiles)},
        loaded=tokens * head_dim + 2 * tiles * keys * head_dim,
        stored=tokens * head_dim,
    )


def two_pass_forward(tokens: int, keys: int, head_dim: int, elements: int) -> TiledSchedule:
    """Return the schedule with the scores in the slow memory.

    First a tile of a x b scores stays while columns of q and k pass by, and a rows keep a maximum
    and a sum: a b + 3a + b <= M; they are stored at the end of a row of tiles. Then a tile of a x b
    of o stays while columns of scores and rows of v pass by: the same room.
    """
    first = _best_product(tokens, keys, elements, head_dim * keys, head_dim * tokens, row_state=2)
    second = _best_product(
        tokens, head_dim, elements, head_dim * keys, tokens * (keys + 2), row_state=2
    )
    scores, sums = tokens * keys, 2 * tokens
    return TiledSchedule(
        regime=_TWO_PASS,
        tiles={
            "queries": first[1],
            "keys": first[2],
            "output queries": second[1],
            "output features": second[2],
        },
        loaded=first[0] + second[0],
        stored=scores + sums + tokens * head_dim,
    )


def _best_product(
    height: int, width: int, elements: int, per_down: int, per_across: int, row_state: int
) -> tuple[int, int, int]:
    """Return elements loaded and the tile a x b of a stationary result that loads the fewest.

    `per_down` elements are loaded for each tile down and `per_across` for each tile across; a tile
    has a b + (1 + row_state) a + b elements at hand.
    """
    best: tuple[int, int, int] | None = None
    for tall in tile_lengths(height):
        wide = min(width, (elements - (1 + row_state) * tall) // (tall + 1))
        if wide < 1:
            continue
        across = ceil_div(width, wide)
        loaded = per_down * ceil_div(height, tall) + per_across * across
        if best is None or loaded < best[0]:
            best = (loaded, tall, ceil_div(width, across))
    assert best is not None, "a tile of one element fits"
    return best


def flash_backward(tokens: int, keys: int, head_dim: int, elements: int) -> TiledSchedule | None:
    """Return the schedule of two kernels, one with rows of q and one with rows of k that stay.

    D = rowsum(do o) is computed first. Then q, do, dq, L and D stay while rows of k and v pass by,
    two of them at hand and a score: B (3d + 3) + 2d <= M. Then k, v, dk and dv stay, with q, do, L
    and D passing by: B (4d + 1) + 2d + 2 <= M. A key is met by as many queries as a query by keys.
    """
    of_queries = min(tokens, (elements - 2 * head_dim) // (3 * head_dim + 3))
    of_keys = min(tokens, (elements - 2 * head_dim - 2) // (4 * head_dim + 1))
    if min(of_queries, of_keys) < 1:
        return None
    down, across = ceil_div(tokens, of_queries), ceil_div(tokens, of_keys)
    loaded = 2 * tokens * head_dim  # o and do, for D
    loaded += tokens * (2 * head_dim + 2) + down * 2 * keys * head_dim
    loaded += 2 * tokens * head_dim + max(across * keys, tokens) * (2 * head_dim + 2)
    return TiledSchedule(
        regime=_FLASH,
        tiles={"queries": ceil_div(tokens, down), "keys": ceil_div(tokens, across)},
        loaded=loaded,
        stored=tokens + 3 * tokens * head_dim,
    )


def sweep_backward(tokens: int, keys: int, head_dim: int, elements: int) -> TiledSchedule | None:
    """Return the schedule of one kernel with rows of k that stay, and dq that is added to.

    k, v, dk and dv stay; q, do, dq, L and D pass by: B (4d + 1) + 3d + 2 <= M.
    """
    most = min(tokens, (elements - 3 * head_dim - 2) // (4 * head_dim + 1))
    if most < 1:
        return None
    tiles = ceil_div(tokens, most)
    visits = max(tiles * keys, tokens)
    return TiledSchedule(
        regime="FlashAttention, one sweep",
        tiles={"keys": ceil_div(tokens, tiles)},
        loaded=2 * tokens * head_dim  # o and do, for D
        + 2 * tokens * head_dim
        + visits * (2 * head_dim + 2)
        + (visits - tokens) * head_dim,
        stored=tokens + 2 * tokens * head_dim + visits * head_dim,
    )


def two_pass_backward(tokens: int, keys: int, head_dim: int, elements: int) -> TiledSchedule:
    """Return the schedule with P and dS in the slow memory.

    Tiles of q k^T and of do v^T, a x b each, stay one after the other: P, then dS from it; three
    products then read P^T, dS and dS^T. Each tile has a b + 3a + b elements at hand, and dS's pass
    loads P again.
    """
    pairs = tokens * keys
    score = _best_product(tokens, keys, elements, head_dim * keys, head_dim * tokens, row_state=2)
    result = _best_product(tokens, head_dim, elements, head_dim * keys, pairs, row_state=2)
    loaded = 2 * tokens * head_dim  # o and do, for D
    loaded += 2 * (score[0] + tokens) + pairs + 3 * result[0]
    return TiledSchedule(
        regime=_TWO_PASS,
        tiles={
            "queries": score[1],
            "keys": score[2],
            "result rows": result[1],
            "result features": result[2],
        },
        loaded=loaded,
        stored=tokens + 2 * pairs + 3 * tokens * head_dim,
    )


_SCHEDULES = {
    "forward": (flash_forward, two_pass_forward),
    "backward": (flash_backward, sweep_backward, two_pass_backward),
}
