"""Bytes of the Triton kernels of a layer, counted under the interpreter, beside their closed form.

`lora.py` starts it in a process of its own, since the interpreter has to be chosen before Triton is
imported. It prints one JSON line an arm: each launch, and the forward pass beside the base product.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import torch
from triton.runtime import interpreter

from _lora_arms import FORWARD
from kernel_bytes.adapters import LayerBytes
from penstock.codegen import count_bytes
from penstock.lora.triton import LayerAdapters, Part, backward, choose_tiles, cut_rows, forward

SHAPES = (
    # rows, inputs, outputs, rank, dropout; in the first ones a tile covers rows and columns
    (60, 96, 48, 8, 0.0),
    (60, 96, 48, 8, 0.1),
    (150, 80, 96, 16, 0.1),
    (150, 80, 96, 24, 0.0),
)
DTYPES = ("float32", "float16")


@dataclasses.dataclass(frozen=True)
class CountedLayer:
    """A layer with one adapter, as the kernels take it."""

    rows: int
    in_features: int
    out_features: int
    rank: int
    dropout: float
    dtype: torch.dtype

    @property
    def is_one_tile(self) -> bool:
        """Whether one tile covers all rows and all columns of the output."""
        tiles = self.tiles
        return self.rows <= tiles.base_rows and self.out_features <= tiles.base_columns

    @property
    def tiles(self) -> Any:
        """Tile sizes; the rows of the first product are those of the base's where they fit."""
        tiles = choose_tiles(self.dtype, self.dtype, (self.rank,))
        if self.rows <= tiles.base_rows:
            tiles = dataclasses.replace(tiles, down_rows=tiles.base_rows)
        return tiles

    def count(self) -> dict[str, dict[str, int]]:
        """Return by launch the counted bytes and those of the closed form."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        part = Part(0, 0, self.rows, 0)
        rows = cut_rows(self.rows, [part], (self.rank,), self.tiles, device=torch.device("cpu"))
        x, weight = normal(self.rows, self.in_features), normal(self.out_features, self.in_features)
        adapters = LayerAdapters(
            downs=(normal(self.rank, self.in_features),),
            ups=(normal(self.out_features, self.rank),),
            scalings=(2.0,),
            dropouts=(self.dropout,),
            seeds=(7,),
        )
        counts: list[Any] = []

        def run(launch: Any) -> None:
            counts.append(count_bytes(launch))

        _, s = forward(x, weight, None, adapters, rows, run=run)
        backward(normal(self.rows, self.out_features), x, weight, s, adapters, rows, run=run)
        forms = self._closed_forms(rows)
        found = {
            name: {
                "loaded": count.loaded_bytes,
                "stored": count.stored_bytes,
                "atomic": count.atomic_bytes,
                "closed": form.requested_bytes,
                "tables": form.table_bytes,
            }
            for count, (name, form) in zip(counts, forms.items(), strict=True)
        }
        if self.is_one_tile:
            found[FORWARD] = self._beside_base(found)
        return found

    def _closed_forms(self, rows: Any) -> dict[str, Any]:
        element = self.dtype.itemsize
        of = LayerBytes(
            rows=rows,
            in_features=self.in_features,
            out_features=self.out_features,
            element=element,
            adapter_element=element,
            has_dropout=self.dropout > 0,
        )
        forms = {"down_product": of.down_product(), "base_product": of.base_product()}
        forms["up_gradient"] = of.up_gradient()
        if self.out_features > rows.tiles.up_columns:
            forms["add_slices"] = of.add_slices()
        forms["add_pieces of dB"] = of.add_pieces(self.out_features)
        forms["down_gradient"] = of.down_gradient()
        forms["add_pieces of dA"] = of.add_pieces(self.in_features)
        forms["base_product of dx"] = of.base_product(backward=True)
        return forms

    def _beside_base(self, found: dict[str, dict[str, int]]) -> dict[str, int]:
        """Return the bytes of the forward pass without x, W and y, and MK + 2 Mr + Nr + rK."""
        m, k, n, r = self.rows, self.in_features, self.out_features, self.rank
        parts = [found["down_product"], found["base_product"]]
        total = {key: sum(each[key] for each in parts) for key in parts[0]}
        element = self.dtype.itemsize
        return {
            "loaded": total["loaded"] - total["tables"] - (m * k + n * k) * element,
            "stored": total["stored"] - m * n * element,
            "atomic": total["atomic"],
            "closed": (m * k + 2 * m * r + n * r + r * k) * element,
            "tables": total["tables"],
        }


def repair_interpreter() -> None:
    """Let loops of interpreted kernels end where NumPy makes no number of an array of one."""
    patched: Any = interpreter._LangPatchScope
    set_attr = patched.set_attr

    def with_item(scope: Any, target: Any, name: str, value: Any) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        set_attr(scope, target, name, value)

    patched.set_attr = with_item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first two shapes")
    options = parser.parse_args()
    repair_interpreter()
    counted = []
    for dtype in DTYPES:
        for shape in SHAPES[: 2 if options.quick else None]:
            layer = CountedLayer(*shape, getattr(torch, dtype))
            start = time.perf_counter()
            for arm, count in layer.count().items():
                m, k, n, r, dropout = shape
                case = f"M {m}, K {k}, N {n}, r {r}, dropout {dropout:g}, {dtype}"
                counted.append({"case": case, "arm": arm, **count})
            counted[-1]["seconds"] = time.perf_counter() - start
            for each in counted:
                each.setdefault("seconds", counted[-1]["seconds"])
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
