"""What `test_kernels.py` runs in a process of its own, where Triton interprets its kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_bytes.adapters import LayerBytes
from lora_layers import Layer, assert_close, kept, make_layers
from penstock.codegen import ByteCount, TritonLaunch, count_bytes
from penstock.iomodel import TileOrder
from penstock.lora import Adapter, AdapterRows, _dropout, _operator, _products, linear
from penstock.lora import triton as triton_lora
from penstock.lora._operator import uses_of
from penstock.lora.triton import _tile_order, backward, choose_tiles, find_parts, forward
from penstock.lora.triton._launch import find_key

assert os.environ.get("TRITON_INTERPRET") == "1", "test_kernels.py runs this"

pytestmark = pytest.mark.usefixtures("interpreter_of_triton")

LAYERS = make_layers()
HALF_LAYERS = make_layers(dtype=torch.float16)
MIXED = ("one adapter", "rows in another order")
KERNELS = {
    "down_product", "base_product", "up_gradient", "down_gradient", "add_slices", "add_pieces",
}  # fmt: skip


def compute(layer: Layer, **options: Any) -> dict[str, Any]:
    adapters, rows = layer.adapters, layer.rows
    y, s = forward(layer.x, layer.weight, layer.bias, adapters, rows, **options)
    dx, ddowns, dups = backward(layer.dy, layer.x, layer.weight, s, adapters, rows, **options)
    return {"y": y, "s": s, "dx": dx, "ddowns": ddowns, "dups": dups}


@functools.cache
def compute_once(name: str) -> dict[str, Any]:
    return compute(LAYERS[name])


def flatten(results: dict[str, Any]) -> list[torch.Tensor]:
    return [results["y"], results["s"], results["dx"], *results["ddowns"], *results["dups"]]


def assert_as_formula(found: dict[str, Any], layer: Layer, **options: Any) -> None:
    for ours, expected in zip(flatten(found), flatten(layer.formula(**options)), strict=True):
        assert_close(ours, expected, layer.dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_the_formula(name):
    assert_as_formula(compute_once(name), LAYERS[name])


@pytest.mark.parametrize("name", HALF_LAYERS)
def test_in_half_precision(name):
    found = compute(HALF_LAYERS[name])
    assert {each.dtype for each in flatten(found)} == {torch.float16}
    assert_as_formula(found, HALF_LAYERS[name])


@pytest.mark.parametrize("name", MIXED)
def test_adapters_in_float32_on_a_layer_in_half_precision(name):
    layer = make_layers(dtype=torch.float16, adapter_dtype=torch.float32)[name]
    found = compute(layer)
    assert found["y"].dtype == found["dx"].dtype == torch.float16
    assert {each.dtype for each in (*found["ddowns"], *found["dups"])} == {torch.float32}
    assert_as_formula(found, layer)
    expected = layer.formula()
    for which in ("ddowns", "dups"):
        for ours, exact in zip(found[which], expected[which], strict=True):
            assert_close(ours, exact, torch.float32)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_results_are_those_of_the_operator_on_the_cpu(is_sorted):
    layer = LAYERS["rows in another order"]
    assignment = torch.arange(75) % 3 - 1
    if is_sorted:  # adapter 1 before adapter 0, and rows of none between them
        assignment = torch.tensor([1] * 30 + [-1] * 5 + [0] * 40)
    rows = AdapterRows.group(assignment, 2)
    assert (rows.order is None) == is_sorted
    parts = find_parts(rows.counts, rows.starts, has_order=rows.order is not None)
    layer = dataclasses.replace(layer, order=rows.order, parts=parts)
    of, found = layer.adapters, compute(layer)
    seeds = torch.tensor(of.seeds)
    uses = uses_of(
        of.downs, of.ups, rows.order, rows.counts, rows.starts, of.scalings, of.dropouts, seeds
    )
    y, s = _products.forward(layer.x, layer.weight, layer.bias, None, uses)
    expected = _products.backward(
        *(layer.dy, layer.x, layer.weight, s, uses),
        needs_x=True,
        needs_down=[True] * 2,
        needs_up=[True] * 2,
    )
    flat = [y, s, expected.x, *expected.downs, *expected.ups]
    for ours, theirs in zip(flatten(found), flat, strict=True):
        assert theirs is not None
        assert_close(ours, theirs, torch.float32)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_operator_calls_the_kernels(is_sorted, monkeypatch):
    """As on a GPU: gradients of some matrices only, tables once for both passes."""
    calls = []
    for name in ("run_forward", "run_backward"):
        run = getattr(triton_lora, name)
        counted = lambda *args, run=run: calls.append(run) or run(*args)  # noqa: E731
        monkeypatch.setattr(triton_lora, name, counted)
    assignment = torch.tensor([1] * 12 + [-1] * 3 + [0] * 10)
    if not is_sorted:
        assignment = torch.arange(25) % 3 - 1
    rows = AdapterRows.group(assignment, 2)

    def run_layer() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x, weight, bias = torch.randn(25, 20), torch.randn(18, 20), torch.randn(18)
        pairs = [(torch.randn(r, 20), torch.randn(18, r)) for r in (4, 3)]
        adapters = [Adapter(*pairs[0], 0.5, 0.25), Adapter(*pairs[1], 2.0)]
        asked = [x, pairs[0][0], pairs[1][1]]
        for each in asked:
            each.requires_grad_()
        y = linear(x, weight, bias, adapters, rows, seed=5)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), asked)]

    expected = run_layer()
    assert not calls
    monkeypatch.setattr(_operator, "has_kernels", lambda *_: True)
    found = run_layer()
    assert len(calls) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, torch.float32)


@pytest.mark.parametrize("name", ["adapters of other ranks", "rows in another order"])
def test_what_adapters_add_to_an_output_that_is_there(name):
    layer = LAYERS[name]
    total = torch.randn(layer.num_rows, layer.out_features)
    y, s = forward(layer.x, None, None, layer.adapters, layer.rows, addend=total)
    found = dict(zip(("dx", "ddowns", "dups"), backward(
        layer.dy, layer.x, None, s, layer.adapters, layer.rows
    ), strict=True))  # fmt: skip
    assert_as_formula({"y": y - total, "s": s, **found}, layer, has_base=False)


def test_operands_of_any_strides():
    name = "adapters of other ranks"
    layer, expected = make_layers()[name], flatten(compute_once(name))
    layer.x, layer.weight = layer.x.t().contiguous().t(), layer.weight.t().contiguous().t()
    for ours, before in zip(flatten(compute(layer)), expected, strict=True):
        assert torch.equal(ours, before)
    layer.dy = torch.ones(1, 1).expand(layer.num_rows, layer.out_features)
    assert_as_formula(compute(layer), layer)


def test_gradients_that_are_not_asked_for_are_not_computed():
    layer, kernels = LAYERS["one adapter"], []

    def run(launch: TritonLaunch) -> None:
        kernels.append(launch.kernel.__name__)
        launch()

    expected = compute_once("one adapter")
    arguments = (layer.dy, layer.x, layer.weight, expected["s"], layer.adapters, layer.rows)
    dx, ddowns, dups = backward(*arguments, needs_x=False, needs_down=False, run=run)
    assert (dx, ddowns) == (None, []) and torch.equal(dups[0], expected["dups"][0])
    assert kernels == ["up_gradient", "add_pieces"]
    dx, ddowns, dups = backward(*arguments, needs_up=False, run=run)
    assert dups == [] and torch.equal(ddowns[0], expected["ddowns"][0])
    assert dx is not None and torch.equal(dx, expected["dx"])


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("name", ["adapters of other ranks", "many pieces"])
def test_two_runs_have_the_same_bits(name):
    first, second = flatten(compute_once(name)), flatten(compute(LAYERS[name]))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_part_has_the_same_bits_beside_any_neighbours():
    """Its rows lie elsewhere, its number is another, and the others have other lengths."""
    together = Layer(130, 24, 40, (3, 8, 4), [(0, 0, 37, 0), (1, 40, 110, 0), (2, 110, 130, 0)],
                     (0.5, 0.1, 0.0), tiles={"gradient_rows": 2})  # fmt: skip
    alone = Layer(70, 24, 40, (8,), [(0, 0, 70, 0)], (0.1,))
    adapters = together.adapters
    alone.adapters = dataclasses.replace(
        adapters, **{f.name: getattr(adapters, f.name)[1:2] for f in dataclasses.fields(adapters)}
    )
    alone.x, alone.weight, alone.bias = together.x[40:110], together.weight, together.bias
    alone.dy = together.dy[40:110]
    assert len(together.rows.pieces) > 16  # of which a part has as many as its own rows need
    tiles = {f.name: getattr(together.rows.tiles, f.name)
             for f in dataclasses.fields(together.rows.tiles)}  # fmt: skip
    alone.tiles = tiles
    alone.rows = alone.cut(alone.parts)
    ours, theirs = compute(together), compute(alone)
    assert torch.equal(ours["y"][40:110], theirs["y"])
    assert torch.equal(ours["dx"][40:110], theirs["dx"])
    assert torch.equal(ours["ddowns"][1], theirs["ddowns"][0])
    assert torch.equal(ours["dups"][1], theirs["dups"][0])


def test_parts_in_one_batch_add_up_as_in_batches_one_after_the_other():
    """So accumulated gradients have the same bits, whatever is packed into a batch."""
    layer = Layer(50, 24, 30, (8,), [(0, 0, 30, 0), (0, 30, 50, 30)], (0.1,),
                  tiles={"gradient_rows": 4})  # fmt: skip
    both = compute(layer)
    gradients = []
    for part in layer.parts:
        layer.rows = layer.cut([part])
        gradients.append(compute(layer))
    for which in ("ddowns", "dups"):
        assert torch.equal(both[which][0], gradients[0][which][0] + gradients[1][which][0])


# ------------------------------------------------------------------------- masks


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**63)])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.999, 1 - 2**-40])
def test_masks_have_the_bits_of_the_definition(seed, dropout):
    """With A, B and dy of ones, dx is the mask, and S and dA are sums of what it keeps."""
    layer = Layer(40, 35, 1, (1,), [(0, 3, 40, 2**32 - 5)], (dropout,))
    layer.adapters = dataclasses.replace(layer.adapters, seeds=(seed,), scalings=(1 - dropout,))
    for matrix in (*layer.adapters.downs, *layer.adapters.ups, layer.dy):
        matrix.fill_(1)
    layer.weight.fill_(0)
    layer.x.copy_(2.0 ** (torch.arange(35) % 5))
    mask = kept(seed, 2**32 - 5 + torch.arange(37), 35, dropout)
    inputs, found = torch.where(mask, layer.x[3:], 0), compute(layer)
    assert torch.equal(found["dx"][3:], mask.float()) and not found["dx"][:3].any()
    assert torch.equal(found["s"], inputs.sum(1))
    assert torch.equal(found["ddowns"][0][0], inputs.sum(0))
    ours = _dropout.keep(seed, 2**32 - 5, 37, 35, dropout, torch.device("cpu"))
    assert torch.equal(mask, ours)


def test_keys_of_seeds():
    assert find_key(-1) == find_key(2**64 - 1)
    assert len({find_key(seed) for seed in (0, 1, 2**32, 2**63 - 1, -1, -(2**63))}) == 6


# ------------------------------------------------------------------------- bytes


def layer_bytes(layer: Layer) -> LayerBytes:
    assert layer.adapter_dtype is not None
    return LayerBytes(
        rows=layer.rows,
        in_features=layer.in_features,
        out_features=layer.out_features,
        element=layer.dtype.itemsize,
        adapter_element=layer.adapter_dtype.itemsize,
        has_dropout=any(layer.dropouts),
    )


def closed_forms(layer: Layer) -> dict[str, Callable[[], ByteCount]]:
    """By launch, in their order, the bytes that the formulas have."""
    of = layer_bytes(layer)
    return {
        "down_product": of.down_product,
        "y": lambda: of.base_product(has_bias=True),
        "up_gradient": of.up_gradient,
        "add_slices": of.add_slices,
        "dB": lambda: of.add_pieces(layer.out_features),
        "down_gradient": of.down_gradient,
        "dA": lambda: of.add_pieces(layer.in_features),
        "dx": lambda: of.base_product(backward=True),
    }


COUNTED = {
    **{name: LAYERS[name] for name in LAYERS if LAYERS[name].parts},
    "in half precision": HALF_LAYERS["adapters of other ranks"],
    "mixed": make_layers(dtype=torch.float16, adapter_dtype=torch.float32)["one adapter"],
    "columns in tiles": Layer(40, 70, 90, (8, 3), [(0, 0, 25, 0), (1, 25, 38, 0)], (0.1, 0.0),
                              tiles={"up_columns": 32, "down_columns": 16, "base_columns": 16}),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_counted_bytes_of_every_kernel_are_those_of_the_formulas(name):
    layer, counts, kernels = COUNTED[name], [], set()

    def run(launch: TritonLaunch) -> None:
        kernels.add(launch.kernel.__name__)
        counts.append(count_bytes(launch))

    compute(layer, run=run)
    forms = closed_forms(layer)
    if layer.out_features <= layer.rows.tiles.up_columns:
        del forms["add_slices"]  # dS is written at once
    assert kernels == KERNELS - ({"add_slices"} if "add_slices" not in forms else set())
    for count, (which, form) in zip(counts, forms.items(), strict=True):
        assert count == form(), which


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_forward_pass_moves_little_beside_the_base_product(dropout):
    """At most MK + 2 Mr + Nr + rK elements where one tile covers the rows and the columns."""
    m, k, n, r = 60, 100, 50, 8
    layer = Layer(m, k, n, (r,), [(0, 0, m, 0)], (dropout,))
    tiles = layer.rows.tiles
    assert m <= tiles.base_rows and n <= tiles.base_columns
    layer.tiles = {"down_rows": 64}
    layer.rows = layer.cut(layer.parts)
    launches: list[TritonLaunch] = []
    forward(layer.x, layer.weight, layer.bias, layer.adapters, layer.rows, run=launches.append)
    count = count_bytes(lambda: [launch() for launch in launches])
    forms = closed_forms(layer)
    tables = forms["down_product"]().table_bytes + forms["y"]().table_bytes
    moved = count.loaded_bytes + count.stored_bytes - tables
    base = m * k + n * k + n + m * n
    assert moved == 4 * (base + m * k + 2 * m * r + n * r + r * k)
    assert count.stored_bytes == 4 * (m * n + m * r)  # y once, S, and no mask


@pytest.mark.parametrize("name", ["row", "grouped", "morton", "chiplet"])
def test_results_are_the_same_bits_in_every_order_of_tiles(name):
    tiles = {"base_columns": 16, "base_rows": 16}
    layer = Layer(58, 24, 40, (8,), [(0, 0, 50, 0)], (0.1,), tiles=tiles)
    order, launches = TileOrder(name=name, group=3, num_chiplets=2), []
    found = compute(layer, tile_order=order)
    for ours, expected in zip(flatten(found), flatten(compute(layer)), strict=True):
        assert torch.equal(ours, expected)
    forward(layer.x, layer.weight, layer.bias, layer.adapters, layer.rows, tile_order=order,
            run=launches.append)  # fmt: skip
    of = layer_bytes(layer)
    has_table = name in ("morton", "chiplet")
    assert len(launches) == 2 and launches[1].constants["HAS_TILE_TABLE"] == has_table
    launches[0]()
    expected = of.base_product(has_bias=True, has_tile_table=has_table)
    assert count_bytes(launches[1]) == expected


def test_orders_are_planned_for_the_cache_of_a_gpu(monkeypatch):
    class Properties:
        L2_cache_size, multi_processor_count = 2**22, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    tiles = choose_tiles(torch.float16, torch.float16, (8,))
    wide = _tile_order._plan(64, 4096, 4096, tiles, 2, torch.device("cpu"))
    tall = _tile_order._plan(1, 4096, 4096, tiles, 2, torch.device("cpu"))
    assert wide.name in ("grouped", "morton") and tall.name == "row"
