"""Launches of the kernels: a layer's output, and the gradients of its input and adapters."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from penstock.codegen import Run, TritonLaunch, launch, product_precision
from penstock.iomodel import TileOrder
from penstock.lora._dropout import mix_words, to_threshold
from penstock.lora.triton import _kernels
from penstock.lora.triton._tables import RowTables
from penstock.lora.triton._tile_order import order_tiles
from penstock.lora.triton._tiles import DTYPES, find_rank_factor

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
NUM_STAGES = 2 if torch.version.hip else 3
"""Tiles on their way: on AMD in registers, of which more than one is too many."""
_WORD = 0xFFFFFFFF
_DOWN_GRADIENT, _UP_GRADIENT = 6, 7  # fields of AdapterRecord


class AdapterRecord(NamedTuple):
    """An entry of the table of adapters, which the kernels read; each field is an int64."""

    down: int
    up: int
    rank: int
    key: int
    threshold: int
    factor_bits: int
    down_gradient: int
    up_gradient: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerAdapters:
    """Adapters of one layer, by adapter.

    Attributes:
        downs: Matrices A, `(r, K)`, contiguous.
        ups: Matrices B, `(N, r)`, contiguous; all adapters have one dtype.
        scalings: Factors of the additions.
        dropouts: Probabilities of dropping an element of x, in [0, 1).
        seeds: Seeds of the masks, 64 bits each.
    """

    downs: tuple[torch.Tensor, ...]
    ups: tuple[torch.Tensor, ...]
    scalings: tuple[float, ...]
    dropouts: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def sample(self) -> torch.Tensor | None:
        """A matrix that has the dtype of all; None without adapters."""
        return self.downs[0] if self.downs else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all matrices; None without adapters."""
        return self.downs[0].dtype if self.downs else None

    def copy_table(
        self,
        device: torch.device,
        down_gradients: Sequence[torch.Tensor] = (),
        up_gradients: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Copy the table of adapters to a device; its last entry, of rank 0, is that of no adapter.

        Args:
            device: The device.
            down_gradients: Memory of the gradients of `downs`, where there are any.
            up_gradients: Memory of the gradients of `ups`, where there are any.
        """
        table = [
            AdapterRecord(
                down=down.data_ptr(),
                up=up.data_ptr(),
                rank=down.shape[0],
                key=find_key(seed),
                threshold=to_threshold(dropout),
                factor_bits=struct.unpack("i", struct.pack("f", scaling / (1 - dropout)))[0],
                down_gradient=down_gradients[number].data_ptr() if down_gradients else 0,
                up_gradient=up_gradients[number].data_ptr() if up_gradients else 0,
            )
            for number, (down, up, scaling, dropout, seed) in enumerate(
                zip(self.downs, self.ups, self.scalings, self.dropouts, self.seeds, strict=True)
            )
        ]
        table.append(AdapterRecord(0, 0, 0, 0, 0, 0, 0, 0))
        return torch.tensor(table, dtype=torch.int64, device="cpu").to(device)


def find_key(seed: int) -> int:
    """Return the part of a row's key that its adapter's rows share: mix(mix(low) + high)."""
    return mix_words((mix_words(seed & _WORD) + (seed >> 32)) & _WORD)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    adapters: LayerAdapters,
    rows: RowTables,
    *,
    addend: torch.Tensor | None = None,
    tile_order: TileOrder | None = None,
    run: Run = launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's output, and the products of rank r for its backward pass.

    Args:
        x: Input, `(M, K)`, float32, float16 or bfloat16, of any strides.
        weight: The matrix W, `(N, K)`, of any strides; None where `addend` is given.
        bias: The vector b, `(N,)`, contiguous, or None.
        adapters: The adapters.
        rows: Tables of the rows for the adapters' ranks and tiles of x's dtype.
        addend: The layer's own output, `(M, N)`, to which the adapters add; without a weight.
        tile_order: Order of the tiles of the base product; None: planned for the GPU.
        run: Takes the launches.

    Returns:
        The output y, `(M, N)`, of the dtype of `addend` or else of x; and S, the matrices
        `(m * x) A^T` of all parts one after the other, in the adapters' dtype.

    Raises:
        TypeError: A dtype has no kernels.
        ValueError: Shapes or layouts do not fit.
    """
    _check_dtypes(x=x, weight=weight, addend=addend, adapters=adapters.sample)
    _check_adapters(x, adapters, rows)
    if weight is None:
        assert addend is not None, "without a weight there is an addend"
        width, out_dtype = addend.shape[1], addend.dtype
    else:
        width, out_dtype = weight.shape[0], x.dtype
    table = adapters.copy_table(x.device)
    s = x.new_empty(rows.num_elements, dtype=adapters.dtype or x.dtype)
    y = x.new_empty(x.shape[0], width, dtype=out_dtype)
    tiles, blocks = rows.tiles, rows.device_tables[0]
    shared = _share_constants(x, adapters, rows)
    grid = (len(rows.blocks), -(-rows.max_rank // tiles.rank))
    sizes = {"BLOCK_ROWS": tiles.down_rows, "BLOCK_INNER": tiles.down_inner}
    run(
        TritonLaunch(
            num_stages=NUM_STAGES,
            kernel=_kernels.down_product,
            grid=grid,
            arguments=(x, *x.stride(), _order(rows, x), blocks, table, s, x.shape[1]),
            num_warps=tiles.rank_warps,
            constants={**shared, **sizes, "BLOCK_RANK": tiles.rank},
        )
    )
    strides = (0, 0) if weight is None else (weight.stride(1), weight.stride(0))
    of_base = _BaseOperands(left=x, weight=weight, strides=strides, bias=bias, addend=addend)
    run(_launch_base_product(of_base, y, s, table, rows, shared, tile_order, backward=False))
    return y, s


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _BaseOperands:
    """Operands of the base product: `left weight + bias + addend`.

    Attributes:
        left: x or dy.
        weight: The matrix W; None leaves the product out.
        strides: Of W along what is summed over, and along the columns of the result.
        bias: The vector b, or None.
        addend: A matrix of the result's shape, or None.
    """

    left: torch.Tensor
    weight: torch.Tensor | None
    strides: tuple[int, int]
    bias: torch.Tensor | None = None
    addend: torch.Tensor | None = None


def _launch_base_product(
    of: _BaseOperands,
    out: torch.Tensor,
    s: torch.Tensor,
    table: torch.Tensor,
    rows: RowTables,
    shared: Mapping[str, Any],
    tile_order: TileOrder | None,
    *,
    backward: bool,
) -> TritonLaunch:
    tiles, blocks = rows.tiles, rows.device_tables[1]
    width, num_blocks = out.shape[1], len(rows.all_blocks)
    ordered = order_tiles(tile_order, num_blocks, (width, of.left.shape[1]), tiles, of.left)
    weight = out if of.weight is None else of.weight  # what is not there is not read
    addend = out if of.addend is None else of.addend
    constants = {
        "BACKWARD": backward,
        "HAS_WEIGHT": of.weight is not None,
        "HAS_BIAS": of.bias is not None,
        "HAS_ADDEND": of.addend is not None,
        "COMPUTE": _TYPES[of.left.dtype],
        "BLOCK_ROWS": tiles.base_rows,
        "BLOCK_COLUMNS": tiles.base_columns,
        "BLOCK_INNER": tiles.base_inner,
        "BLOCK_RANK": tiles.base_rank,
        "GROUP": ordered.group,
        "HAS_TILE_TABLE": ordered.table is not None,
    }
    return TritonLaunch(
        num_stages=NUM_STAGES,
        kernel=_kernels.base_product,
        grid=(num_blocks * -(-width // tiles.base_columns),),
        arguments=(
            *(of.left, *of.left.stride(), weight, *of.strides),
            *(out if of.bias is None else of.bias, addend, *addend.stride()),
            *(out, _order(rows, out), blocks, num_blocks, table, s, of.left.shape[1], width),
            blocks if ordered.table is None else ordered.table,
        ),
        constants={**shared, **constants},
        num_warps=tiles.base_warps,
    )


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    s: torch.Tensor,
    adapters: LayerAdapters,
    rows: RowTables,
    *,
    needs_x: bool = True,
    needs_down: bool = True,
    needs_up: bool = True,
    tile_order: TileOrder | None = None,
    run: Run = launch,
) -> tuple[torch.Tensor | None, list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of `forward`; the gradient of an addend is `dy` itself.

    Args:
        dy: Gradient of the output, `(M, N)`, of any strides.
        x: Input, `(M, K)`.
        weight: The matrix W, or None as in `forward`.
        s: The second result of `forward`.
        adapters: The adapters, with the seeds of the forward pass.
        rows: Tables of the rows.
        needs_x: Whether the gradient of x is asked for.
        needs_down: Whether those of the matrices A are.
        needs_up: Whether those of the matrices B are.
        tile_order: As in `forward`.
        run: Takes the launches.

    Returns:
        The gradient of x, `(M, K)` in its dtype, or None; those of all A, and of all B, in the
        adapters' dtype; empty lists where they are not asked for.

    Raises:
        TypeError: A dtype has no kernels.
        ValueError: Shapes or layouts do not fit.
    """
    _check_dtypes(x=x, weight=weight, dy=dy, adapters=adapters.sample)
    _check_adapters(x, adapters, rows)
    ddowns = [torch.empty_like(each) for each in adapters.downs] if needs_down else []
    dups = [torch.empty_like(each) for each in adapters.ups] if needs_up else []
    table = adapters.copy_table(x.device, ddowns, dups)
    shared = _share_constants(x, adapters, rows)
    ds = _run_up_gradient(dy, s, table, rows, shared, dups, run)
    if ddowns:
        _run_down_gradient(x, ds, table, rows, shared, ddowns, run)
    if not needs_x:
        return None, ddowns, dups
    dx = x.new_empty(x.shape)
    strides = (0, 0) if weight is None else weight.stride()
    of_base = _BaseOperands(left=dy, weight=weight, strides=(strides[0], strides[1]))
    run(_launch_base_product(of_base, dx, ds, table, rows, shared, tile_order, backward=True))
    return dx, ddowns, dups


def _run_up_gradient(
    dy: torch.Tensor,
    s: torch.Tensor,
    table: torch.Tensor,
    rows: RowTables,
    shared: Mapping[str, Any],
    gradients: Sequence[torch.Tensor],
    run: Run,
) -> torch.Tensor:
    """Write the gradients of all B that are asked for, and return dS, laid out as S is."""
    tiles, width, pieces = rows.tiles, dy.shape[1], rows.device_tables[2]
    num_slices = -(-width // tiles.up_columns)
    ds = torch.empty_like(s)
    slices = ds if num_slices == 1 else s.new_empty(num_slices, len(s), dtype=torch.float32)
    partial = dy.new_empty(rows.num_partial_ranks * width, dtype=torch.float32)
    grid = (len(rows.pieces) * num_slices, -(-rows.max_rank // tiles.rank))
    operands = (dy, *dy.stride(), _order(rows, dy), pieces, table, s)
    sizes = {"BLOCK_COLUMNS": tiles.up_columns, "BLOCK_RANK": tiles.rank}
    run(
        TritonLaunch(
            num_stages=NUM_STAGES,
            kernel=_kernels.up_gradient,
            grid=grid,
            arguments=(*operands, slices, len(s), partial, width),
            num_warps=tiles.rank_warps,
            constants={
                **{name: shared[name] for name in shared if name != "DROPOUT"},
                **{"BLOCK_ROWS": tiles.gradient_rows, **sizes},
            },
        )
    )
    if num_slices > 1:
        grid = (-(-len(s) // tiles.added),)
        sizes = {"BLOCK": tiles.added}
        arguments = (slices, ds, len(s), num_slices)
        run(
            TritonLaunch(
                num_stages=NUM_STAGES,
                kernel=_kernels.add_slices,
                grid=grid,
                arguments=arguments,
                constants=sizes,
            )
        )
    if gradients:
        run(_launch_sum(partial, table, rows, shared, width, gradients, _UP_GRADIENT))
    return ds


def _run_down_gradient(
    x: torch.Tensor,
    ds: torch.Tensor,
    table: torch.Tensor,
    rows: RowTables,
    shared: Mapping[str, Any],
    gradients: Sequence[torch.Tensor],
    run: Run,
) -> None:
    """Write the gradients of all A."""
    tiles, width, pieces = rows.tiles, x.shape[1], rows.device_tables[2]
    partial = x.new_empty(rows.num_partial_ranks * width, dtype=torch.float32)
    num_programs = len(rows.pieces) * -(-width // tiles.down_columns)
    sizes = {"BLOCK_COLUMNS": tiles.down_columns, "BLOCK_RANK": tiles.rank}
    run(
        TritonLaunch(
            num_stages=NUM_STAGES,
            kernel=_kernels.down_gradient,
            grid=(num_programs, -(-rows.max_rank // tiles.rank)),
            arguments=(x, *x.stride(), _order(rows, x), pieces, table, ds, partial, width),
            num_warps=tiles.rank_warps,
            constants={
                **{name: shared[name] for name in shared if name != "ALIGNED"},
                **{"BLOCK_ROWS": tiles.gradient_rows, **sizes},
            },
        )
    )
    run(_launch_sum(partial, table, rows, shared, width, gradients, _DOWN_GRADIENT))


def _launch_sum(
    partial: torch.Tensor,
    table: torch.Tensor,
    rows: RowTables,
    shared: Mapping[str, Any],
    width: int,
    gradients: Sequence[torch.Tensor],
    field: int,
) -> TritonLaunch:
    """Return the launch that adds partial sums of gradients, of which some may be empty."""
    longest = max(gradient.numel() for gradient in gradients)
    return TritonLaunch(
        num_stages=NUM_STAGES,
        kernel=_kernels.add_pieces,
        grid=(len(gradients), -(-longest // rows.tiles.added)),
        arguments=(partial, *rows.device_tables[2:], table, width),
        constants={
            "FIELD": field,
            "ELEMENT": shared["ELEMENT"],
            "ALIGNED": all(gradient.data_ptr() % 16 == 0 for gradient in gradients),
            "BLOCK": rows.tiles.added,
        },
    )


def _order(rows: RowTables, placeholder: torch.Tensor) -> torch.Tensor:
    """Return the order, or where there is none a tensor that is not read."""
    return placeholder if rows.order is None else rows.order


def _share_constants(x: torch.Tensor, adapters: LayerAdapters, rows: RowTables) -> dict[str, Any]:
    matrices = (*adapters.downs, *adapters.ups)
    return {
        "HAS_ORDER": rows.order is not None,
        "RANK_FACTOR": find_rank_factor(rows.ranks),
        "DROPOUT": any(dropout > 0 for dropout in adapters.dropouts),
        "ELEMENT": _TYPES[adapters.dtype or x.dtype],
        "ALIGNED": all(each.data_ptr() % 16 == 0 for each in matrices),
        "PRECISION": product_precision(),
    }


def _check_dtypes(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} has the dtype {tensor.dtype}; the Triton kernels accept torch.float32, "
                "torch.float16 and torch.bfloat16: convert it, or move the layer to the CPU"
            )


def _check_adapters(x: torch.Tensor, adapters: LayerAdapters, rows: RowTables) -> None:
    matrices = (*adapters.downs, *adapters.ups)
    if any(each.dtype != adapters.dtype or not each.is_contiguous() for each in matrices):
        raise ValueError("the adapters' matrices must be contiguous and of one dtype: copy them")
    if tuple(len(down) for down in adapters.downs) != rows.ranks or len(x) != rows.num_rows:
        raise ValueError(
            f"x has {len(x)} rows and the adapters the ranks {[len(d) for d in adapters.downs]}; "
            f"rows is for {rows.num_rows} rows and {list(rows.ranks)}"
        )
