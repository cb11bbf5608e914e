"""Triton kernels of layers with adapters: interpreted, compiled for GPUs, and run on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_tests import compile_well, needs_triton, run_interpreted, run_without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    run_interpreted(HERE / "interpreted_kernels.py", at_least=65)


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import torch\nfrom penstock import lora\n"
        "adapter = lora.Adapter(torch.ones(2, 4), torch.ones(3, 2))\n"
        "lora.linear(torch.ones(5, 4), torch.ones(3, 4), None, [adapter], seed=1)\n"
    )
    run_without("penstock.lora.triton", code)


# ------------------------------------------------------------------------ compiled


def record_launches(
    dtype: torch.dtype, adapter_dtype: torch.dtype, ranks: tuple[int, ...], **options: Any
) -> list[Any]:
    """The launches of a layer, forward and backward, without those that are alike."""
    from lora_layers import Layer
    from penstock.lora.triton import backward, forward

    layer = Layer(
        *(300, 512, 768, ranks, [(0, 0, 100, 0), (len(ranks) - 1, 120, 300, 0)]),
        (0.1,) * len(ranks), torch.arange(300), dtype, adapter_dtype,
    )  # fmt: skip
    found: list[Any] = []
    options["run"] = found.append
    _, s = forward(layer.x, layer.weight, layer.bias, layer.adapters, layer.rows, **options)
    backward(layer.dy, layer.x, layer.weight, s, layer.adapters, layer.rows, **options)
    return list({(each.kernel.__name__, str(each.constants)): each for each in found}.values())


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "ranks"),
    [
        (HALF, HALF, (8, 16)),
        (BRAIN, BRAIN, (128, 64)),
        (FLOAT, FLOAT, (16,)),
        (BRAIN, FLOAT, (16,)),
    ],
    ids=["fp16", "bf16 rank 128", "fp32", "bf16 with adapters in fp32"],
)
def test_kernels_compile_without_spills(dtype, adapter_dtype, ranks, target):
    seen = set()
    for launch in record_launches(dtype, adapter_dtype, ranks):
        stages = {"sm_90": 3, "gfx942": 2}[target]
        text, _ = compile_well(dataclasses.replace(launch, num_stages=stages), target)
        name = launch.kernel.__name__
        seen.add(name)
        if "add" not in name and dtype != FLOAT and adapter_dtype != FLOAT:
            instruction = {"sm_90": "wgmma", "gfx942": "mfma"}[target]
            assert instruction in text, name
    assert len(seen) == 6


@needs_triton
def test_the_base_product_compiles_with_a_table_of_its_tiles():
    """The interpreter has no types that a variable would have to keep."""
    from penstock.iomodel import TileOrder

    launches = record_launches(BRAIN, BRAIN, (16,), tile_order=TileOrder(name="morton"))
    with_table = [each for each in launches if each.constants.get("HAS_TILE_TABLE")]
    assert len(with_table) == 2  # forward and backward
    for launch in with_table:
        compile_well(launch, "sm_90")


# ---------------------------------------------------------------------- refusals


@needs_triton
def test_other_dtypes_and_layouts_are_refused_with_the_remedy():
    from lora_layers import Layer
    from penstock.lora.triton import choose_tiles, cut_rows, forward

    layer = Layer(10, 16, 16, (4,), [(0, 0, 10, 0)])
    operands = (layer.bias, layer.adapters, layer.rows)
    with pytest.raises(TypeError, match=r"x has the dtype torch.float64; .*convert it"):
        forward(layer.x.double(), layer.weight, *operands)
    with pytest.raises(TypeError, match=r"weight has the dtype torch.int8"):
        forward(layer.x, layer.weight.to(torch.int8), *operands)
    with pytest.raises(ValueError, match=r"x has 9 rows.*rows is for 10 rows and \[4\]"):
        forward(layer.x[:9], layer.weight, *operands)
    turned = dataclasses.replace(layer.adapters, downs=(torch.ones(16, 4).t(),))
    with pytest.raises(ValueError, match="contiguous and of one dtype"):
        forward(layer.x, layer.weight, None, turned, layer.rows)
    with pytest.raises(TypeError, match=r"the adapters torch.float64"):
        choose_tiles(FLOAT, torch.float64, (4,))
    tiles, cpu = choose_tiles(FLOAT, FLOAT, (4,)), torch.device("cpu")
    for parts, ranks, message in (
        ([(0, 0, 6, 0), (0, 5, 8, 6)], (4,), "neither overlap nor reach"),
        ([(0, 0, 11, 0)], (4,), "neither overlap nor reach"),
        ([(1, 0, 6, 0)], (4,), "not among the 1 with ranks"),
        ([], (0,), "ranks of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cut_rows(10, parts, ranks, tiles, device=cpu)
    with pytest.raises(ValueError, match="order has 11 rows"):
        cut_rows(10, [], (4,), tiles, device=cpu, order=torch.arange(11))


# ------------------------------------------------------------------------ tables


@needs_triton
def test_blocks_and_pieces_have_every_row_once_and_of_one_adapter():
    from penstock.lora.triton import choose_tiles, cut_rows
    from penstock.lora.triton._tables import MAX_PIECES

    parts = [(1, 5, 4000, 7), (0, 4000, 4001, 0), (1, 4100, 4200, 4002), (2, 4200, 4200, 0)]
    ranks = (8, 3, 16)
    tiles = choose_tiles(HALF, HALF, ranks)
    rows = cut_rows(5000, parts, ranks, tiles, device=torch.device("cpu"))
    adapters = torch.full((5000,), 3)
    for adapter, start, stop, _ in parts:
        adapters[start:stop] = adapter
    for entries, num_rows in ((rows.blocks, 4096), (rows.all_blocks, 5000), (rows.pieces, 4096)):
        positions = torch.cat([entry.first + torch.arange(entry.num_rows) for entry in entries])
        assert len(positions.unique()) == len(positions) == num_rows
        for entry in entries:
            assert adapters[entry.first : entry.first + entry.num_rows].eq(entry.adapter).all()
    for entry in (*rows.blocks, *rows.pieces):
        start, first = next((p[1], p[3]) for p in parts if p[1] <= entry.first < p[2])
        assert entry.number == first + entry.first - start
    assert (rows.adapter_parts, rows.part_pieces[1]) == ((0, 1, 3, 4), 1)
    assert rows.part_pieces[2] - rows.part_pieces[1] <= MAX_PIECES
    assert rows.num_elements == (3995 + 100) * 3 + 8
    assert rows.num_partial_ranks == sum(ranks[piece.adapter] for piece in rows.pieces)


@needs_triton
def test_an_order_is_completed_by_the_rows_it_lacks():
    from penstock.lora.triton import choose_tiles, cut_rows

    tiles, order = choose_tiles(HALF, HALF, (8,)), torch.tensor([7, 2, 5])
    rows = cut_rows(8, [(0, 0, 3, 0)], (8,), tiles, device=torch.device("cpu"), order=order)
    assert rows.order is not None and rows.order.tolist() == [7, 2, 5, 0, 1, 3, 4, 6]


# ----------------------------------------------------------------------- a device


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(FLOAT, None), (HALF, None), (BRAIN, None), (BRAIN, FLOAT)])
def test_on_a_device_results_are_those_of_the_formula_and_the_same_in_every_run(dtypes):
    from lora_layers import Layer, assert_close, make_layers
    from penstock.lora.triton import backward, forward

    dtype, adapter_dtype = dtypes
    layers = make_layers("cuda", dtype, adapter_dtype)
    large = Layer(
        *(1500, 800, 1100, (16, 64, 128), [(0, 0, 700, 0), (1, 700, 1100, 0), (2, 1200, 1500, 0)]),
        (0.1, 0.0, 0.5), None, dtype, adapter_dtype, "cuda",
    )  # fmt: skip
    for name, layer in {**layers, "large": large}.items():
        runs = []
        for _ in range(2):
            y, s = forward(layer.x, layer.weight, layer.bias, layer.adapters, layer.rows)
            operands = (layer.dy, layer.x, layer.weight, s, layer.adapters, layer.rows)
            dx, ddowns, dups = backward(*operands)
            runs.append([y, s, dx, *ddowns, *dups])
        expected = layer.formula()
        flat = [expected["y"], expected["s"], expected["dx"]]
        flat += [*expected["ddowns"], *expected["dups"]]
        for first, second, exact in zip(*runs, flat, strict=True):
            assert torch.equal(first, second), name
            assert_close(first, exact, dtype)
