"""Layers of many shapes and adapters, as the kernels take them and as the formula has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.lora.triton import LayerAdapters, RowTables, choose_tiles, cut_rows

WORD = 0xFFFFFFFF


def mix(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def kept(seed: int, numbers: torch.Tensor, num_columns: int, dropout: float) -> torch.Tensor:
    """The mask of rows by their numbers, from its definition."""
    low, high = torch.tensor(seed & WORD), (seed >> 32) & WORD
    key = mix((mix((mix(low) + high) & WORD) + numbers) & WORD)
    words = mix((key[:, None] + torch.arange(num_columns) * 0x9E3779B9) & WORD)
    return words >= min(round(dropout * 2**32), 2**32 - 1)


@dataclasses.dataclass
class Layer:
    """A layer with adapters and rows, on a device; its formula is computed on the CPU in float64.

    Attributes:
        parts: (adapter, start, stop, first number), positions in `order`.
        tiles: Sizes that differ from those of the dtype.
    """

    num_rows: int
    in_features: int
    out_features: int
    ranks: tuple[int, ...]
    parts: list[tuple[int, int, int, int]]
    dropouts: tuple[float, ...] = ()
    order: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    adapter_dtype: torch.dtype | None = None
    device: str = "cpu"
    tiles: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.adapter_dtype = self.adapter_dtype or self.dtype
        self.dropouts = self.dropouts or (0.0,) * len(self.ranks)
        m, n, k = self.num_rows, self.out_features, self.in_features
        random = lambda *shape: torch.randn(*shape).to(self.dtype)  # noqa: E731
        self.x, self.weight, self.bias, self.dy = (
            each.to(self.device) for each in (random(m, k), random(n, k), random(n), random(m, n))
        )
        of = [(torch.randn(r, k), torch.randn(n, r)) for r in self.ranks]
        self.adapters = LayerAdapters(
            downs=tuple(down.to(self.device, self.adapter_dtype) for down, _ in of),
            ups=tuple(up.to(self.device, self.adapter_dtype) for _, up in of),
            scalings=tuple(0.5 + number for number in range(len(self.ranks))),
            dropouts=self.dropouts,
            seeds=tuple(2**63 - 5 * number - 7 for number in range(len(self.ranks))),
        )
        self.rows = self.cut(self.parts)

    def cut(self, parts: list[Any]) -> RowTables:
        tiles = choose_tiles(self.dtype, self.adapter_dtype, self.ranks)
        return cut_rows(
            self.num_rows,
            parts,
            self.ranks,
            dataclasses.replace(tiles, **self.tiles),
            device=torch.device(self.device),
            order=self.order,
        )

    def formula(self, *, has_base: bool = True) -> dict[str, Any]:
        """y, S, dx, dA and dB by the formula; without a base what the adapters add."""
        x, w, b, dy = (each.cpu().double() for each in (self.x, self.weight, self.bias, self.dy))
        y = x @ w.t() + b if has_base else torch.zeros(self.num_rows, self.out_features).double()
        dx = dy @ w if has_base else torch.zeros_like(x)
        order = torch.arange(self.num_rows) if self.order is None else self.order.cpu()
        downs, ups = (
            [each.cpu().double() for each in of] for of in (self.adapters.downs, self.adapters.ups)
        )
        ddowns, dups = (
            [torch.zeros_like(each) for each in downs],
            [torch.zeros_like(u) for u in ups],
        )
        products = []
        for adapter, start, stop, first in self.parts:
            rows, p = order[start:stop], self.dropouts[adapter]
            numbers = first + torch.arange(stop - start)
            mask = kept(self.adapters.seeds[adapter], numbers, self.in_features, p)
            inputs = torch.where(mask, x[rows], 0)
            factor = self.adapters.scalings[adapter] / (1 - p)
            s = inputs @ downs[adapter].t()
            ds = factor * dy[rows] @ ups[adapter]
            y[rows] += factor * s @ ups[adapter].t()
            dx[rows] += torch.where(mask, ds @ downs[adapter], 0)
            ddowns[adapter] += ds.t() @ inputs
            dups[adapter] += factor * dy[rows].t() @ s
            products.append(s.flatten())
        s = torch.cat(products) if products else torch.empty(0)
        return {"y": y, "s": s, "dx": dx, "ddowns": ddowns, "dups": dups}


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with the formula in float64.

    Sums of a few hundred products of numbers near 1, relative to the largest: in float32 each is
    rounded by 2**-24, in float16 and bfloat16 the result and S, which is stored, by 2**-11 and
    2**-8.
    """
    tolerance = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=0, atol=tolerance * max(scale, 1.0)
    )


def make_layers(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype | None = None,
) -> dict[str, Layer]:
    """Layers with rows of every kind, by what is special about them."""

    def layer(*args: Any, **kwargs: Any) -> Layer:
        return Layer(*args, dtype=dtype, adapter_dtype=adapter_dtype, device=device, **kwargs)

    order = torch.randperm(75, generator=torch.Generator().manual_seed(1))[:70].to(device)
    return {
        "one adapter": layer(70, 50, 41, (8,), [(0, 0, 70, 0)], (0.1,)),
        "without dropout": layer(33, 16, 80, (16,), [(0, 0, 33, 0)]),
        "one row": layer(1, 40, 24, (3,), [(0, 0, 1, 9)], (0.5,)),
        "adapters of other ranks": layer(
            *(75, 50, 70, (4, 16, 1, 20)),
            [(0, 3, 40, 0), (1, 40, 41, 0), (3, 42, 75, 100)],
            (0.25, 0.0, 0.1, 0.9),
        ),
        "rows in another order": layer(
            *(75, 33, 50, (5, 18)), [(0, 0, 40, 0), (1, 40, 70, 0)], (0.3, 0.1), order
        ),
        "parts of one adapter": layer(
            *(60, 24, 40, (8, 2)),
            [(0, 0, 10, 0), (1, 10, 30, 0), (0, 30, 45, 10), (0, 50, 60, 25)],
            (0.2, 0.0),
        ),
        "no adapter": layer(20, 24, 40, (), []),
        "adapters without rows": layer(20, 24, 40, (8, 4), [(1, 5, 5, 0)], (0.2, 0.0)),
        "no rows": layer(0, 24, 40, (8, 4), []),
        "ranks in tiles": layer(
            *(40, 24, 70, (40, 16)), [(0, 0, 20, 0), (1, 20, 40, 0)], (0.2, 0.1),
            tiles={"rank": 16, "base_rank": 16},
        ),
        "many pieces": layer(
            *(80, 20, 35, (8, 4)), [(0, 0, 70, 0), (1, 70, 80, 0)], (0.2, 0.1),
            tiles={"gradient_rows": 4 if device == "cpu" else 16, "added": 64},
        ),
    }  # fmt: skip
