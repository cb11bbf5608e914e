"""What `test_triton_kernel.py` runs in a process of its own, where Triton interprets its kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

from kernel_bytes.records import requested_bytes
from penstock.codegen import count_bytes
from penstock.kv.triton import _operator, attend_records
from penstock.kv.triton._copy import common_alignment, copy_launch
from penstock.kv.triton._launch import RecordCall, attend, choose_tiles
from record_layer import FLOAT, HALF, TOLERANCE, Layer, assert_close

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton_kernel.py runs this"

HALF_TOLERANCE = 2e-3
"""Queries and records are exact; weights below 1 are rounded by 2**-11 each, to the same side at
worst, and multiply values near 1 or 2."""
DIMS = [(16, 16), (20, 40), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256), (33, 31)]

pytestmark = [
    pytest.mark.usefixtures("interpreter_of_triton"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]


def compute(layer: Layer, **options: Any) -> tuple[torch.Tensor, ...]:
    layer.query = layer.query.to(layer.dtype)
    return layer.attend(attend_records, with_block_lse=True, **options)


def check(layer: Layer, **options: Any) -> tuple[torch.Tensor, ...]:
    found = compute(layer, **options)
    visible = options.get("visible")
    if visible is not None and visible.dim() == 3:
        options = {**options, "visible": visible[:, None]}
    tolerance = TOLERANCE if layer.dtype == FLOAT else HALF_TOLERANCE
    assert_close(found, layer.formula(**options), tolerance)
    return found


def call_of(layer: Layer, **options: Any) -> RecordCall:
    assert layer.counts is not None
    fields = {"softcap": 0.0, "visible": None, "bias": None, "is_aligned": False, **options}
    return RecordCall(
        query=layer.query.to(layer.dtype),
        addresses=layer.addresses,
        counts=layer.counts,
        block_tokens=layer.block_tokens,
        value_dim=layer.value_dim,
        scale=layer.scale,
        **fields,
    )


# -------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("dims", DIMS)
def test_dims(dims, dtype):
    shape = {"batch": 1, "num_records": 2, "key_dim": dims[0], "value_dim": dims[1]}
    for group, num_tokens in ((1, 1), (3, 2)):
        check(Layer(**shape, group=group, num_tokens=num_tokens, dtype=dtype))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
def test_groups_and_tokens(group, num_tokens):
    shape = {"batch": 1, "num_records": 2, "key_dim": 24, "value_dim": 32}
    check(Layer(**shape, group=group, num_tokens=num_tokens, dtype=HALF if group % 2 else FLOAT))


@pytest.mark.parametrize(
    ("block_tokens", "num_records"), [(1, 20), (7, 20), (16, 20), (64, 5), (100, 3)]
)
def test_records_of_other_lengths_in_many_tasks(block_tokens, num_records):
    layer = Layer(batch=1, block_tokens=block_tokens, num_records=num_records, group=2)
    assert choose_tiles(call_of(layer)).num_tasks > 1
    check(layer)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_softcap_bias_and_visible_by_head(softcap, dtype):
    layer = Layer(group=4, num_tokens=3, key_dim=24, num_records=10, dtype=dtype)
    assert choose_tiles(call_of(layer)).num_tasks > 1
    bias = torch.randn(layer.batch, layer.query.shape[1], 3, layer.num_scores())
    visible = torch.rand(layer.batch, layer.kv_heads, 3, layer.num_scores()) < 0.5
    visible[1, 1, 2] = False  # one row sees nothing, another record is hidden from all
    visible[..., layer.block_tokens : 2 * layer.block_tokens] = False
    options = {"softcap": softcap, "scale": 1.5, "visible": visible, "bias": bias}
    out, lse, _ = check(layer, **options)
    assert torch.equal(out[1, 4:, 2], torch.zeros_like(out[1, 4:, 2]))
    assert (lse[1, 4:, 2] == -torch.inf).all()


def test_a_window_and_other_strides():
    layer = Layer(group=2, num_tokens=4, num_records=10)
    assert choose_tiles(call_of(layer)).num_tasks > 1
    tokens = torch.arange(layer.num_scores())
    ends = layer.num_scores() - 4 + torch.arange(4)[:, None]
    window = ((tokens <= ends) & (tokens > ends - 40)).expand(layer.batch, 4, -1)
    check(layer, visible=window)
    bias = torch.randn(layer.num_scores(), 4, 4).permute(1, 2, 0)  # tokens lie apart
    check(layer, bias=bias)
    check(layer, bias=bias[:1, :1])  # one row of all heads and tokens


def test_small_scores_keep_their_precision_under_a_softcap():
    """The log-sum-exp of one token is its score; (1 - e) / (1 + e) would be off by 1 % of it."""
    counts = torch.ones(1, 2, 1, dtype=torch.int32)
    layer = Layer(batch=1, num_records=1, counts=counts, key_dim=32, num_tokens=5)
    options = {"scale": 1e-3, "softcap": 1000.0}
    found, expected = compute(layer, **options)[1], layer.formula(**options)[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-8)


def test_maxima_of_tasks_far_apart():
    """Sums of a task are relative to its own maximum; others would overflow in the merge."""
    layer = Layer(batch=1, num_records=11, num_tokens=2)
    assert choose_tiles(call_of(layer)).num_tasks > 1
    bias = torch.linspace(0, 500, layer.num_scores()).expand(2, 2, -1)
    for shift in (bias, bias.flip(-1)):
        found, expected = compute(layer, bias=shift), layer.formula(bias=shift)
        torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=2e-4)


def test_records_that_are_empty_have_no_address():
    layer = Layer(num_records=6)
    assert layer.counts is not None
    layer.counts[..., 3:] = 0
    layer.is_valid = torch.arange(layer.block_tokens) < layer.counts[..., None]
    layer.addresses[..., 3:] = 0
    check(layer)
    layer.counts[:] = 0
    layer.addresses[:] = 0
    out, lse, block_lse = compute(layer)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all() and (block_lse == -torch.inf).all()


def test_counts_above_a_record_are_those_of_a_whole_one():
    layer = Layer(counts=torch.full((2, 2, 4), 24, dtype=torch.int32), num_records=4)
    expected = compute(layer)
    layer.counts = layer.counts + 9  # pyright: ignore[reportOptionalOperand]
    assert all(torch.equal(a, b) for a, b in zip(compute(layer), expected, strict=True))


def test_no_records_and_empty_batches():
    layer = Layer()
    for records, batch in ((0, 2), (5, 0)):
        out, lse, block_lse = attend_records(
            layer.query[:batch],
            layer.addresses[:batch, :, :records],
            layer.counts[:batch, :, :records],  # pyright: ignore[reportOptionalSubscript]
            block_tokens=24,
            value_dim=16,
            scale=1.0,
            with_block_lse=True,
        )
        assert out.shape == (batch, 2, 1, 16) and not out.any()
        assert (lse == -torch.inf).all()
        assert block_lse is not None and block_lse.shape == (batch, 2, 1, records)


def test_nan_is_not_lost():
    layer = Layer(batch=1, kv_heads=1, num_records=30)
    layer.query[..., 0] = torch.nan
    out, lse, _ = compute(layer)
    assert out.isnan().all() and lse.isnan().all()


def test_a_sequence_has_the_same_bits_in_every_batch_and_other_cuts_agree():
    layer = Layer(batch=3, kv_heads=1, num_records=11, group=2)
    whole = compute(layer)
    call = call_of(layer)
    one = dataclasses.replace(
        call, query=call.query[1:2], addresses=call.addresses[1:2], counts=call.counts[1:2]
    )
    alone = attend(one, with_block_lse=True)
    assert all(torch.equal(a, b[1:2]) for a, b in zip(alone, whole, strict=True))
    tiles = choose_tiles(call)
    assert tiles.num_tasks > 1
    num_tiles = layer.num_records * tiles.of_record
    for of_task in (1, 3, num_tiles, 4 * num_tiles):
        cut = dataclasses.replace(tiles, of_task=of_task, num_tasks=math.ceil(num_tiles / of_task))
        assert_close(attend(call, with_block_lse=True, tiles=cut), layer.formula())


# --------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_records": 4},
        {"num_records": 11, "group": 4},
        {
            "num_records": 5,
            "block_tokens": 100,
            "key_dim": 80,
            "value_dim": 33,
            "num_tokens": 3,
            "kv_heads": 1,
        },
        {"num_records": 2, "kv_heads": 1, "group": 8, "num_tokens": 16, "key_dim": 256},
    ],
)
def test_bytes_are_those_of_the_formula(shape, dtype):
    layer = Layer(**shape, batch=1, dtype=dtype)
    width, heads = layer.num_scores(), layer.query.shape[1]
    visible = torch.rand(layer.batch, layer.kv_heads, layer.num_tokens, width) < 0.5
    bias = torch.randn(layer.batch, heads, layer.num_tokens, width)
    masked = {"visible": visible, "bias": bias, "softcap": 3.0}
    for options in ({}, masked):
        call = call_of(layer, **options)
        tiles = choose_tiles(call)
        # Of larger shapes two of the four forms, in which each term of the formula is once.
        for with_block_lse in (False, True) if layer.num_records == 4 else (options is masked,):
            count = count_bytes(lambda: attend(call, with_block_lse=with_block_lse))  # noqa: B023
            assert count == requested_bytes(call, tiles, with_block_lse=with_block_lse)


def test_records_are_read_once_for_the_rows_of_a_group():
    """Of 64 tokens and more the records are nearly all that is read, whatever the group."""
    for group in (1, 8):
        layer = Layer(num_records=20, block_tokens=64, group=group, key_dim=64, value_dim=64)
        call = call_of(layer)
        loaded = requested_bytes(call, choose_tiles(call), with_block_lse=False).loaded_bytes
        assert layer.counts is not None
        records = int(layer.counts.sum()) * 128 * 4
        assert records < loaded < 1.1 * records


# ------------------------------------------------------------------------- operator


@pytest.mark.parametrize("with_block_lse", [False, True])
def test_the_operator_is_as_torch_wants_it(with_block_lse):
    layer = Layer(batch=1, num_records=3)
    visible = torch.rand(1, 1, layer.num_scores()) < 0.7
    options = (24, 16, 0.25, 0.0, visible, None, with_block_lse, False)
    torch.library.opcheck(
        _operator._attend_records, (layer.query, layer.addresses, layer.counts, *options)
    )


def test_gradients_are_refused():
    layer = Layer(batch=1)
    layer.query.requires_grad_()
    out, _, _ = compute(layer)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"autograd|backward"):
        out.sum().backward()


def test_what_cannot_be_read_is_refused_by_name():
    layer = Layer()
    layer.dtype = HALF
    wrong = r"query has the dtype torch.float32 and records have torch.float16.*convert the query"
    with pytest.raises(TypeError, match=wrong):
        layer.attend(attend_records)
    layer.dtype = FLOAT
    with pytest.raises(TypeError, match=r"counts torch.int64"):
        attend_records(layer.query, layer.addresses, layer.addresses, block_tokens=24, value_dim=16,
                       scale=1.0)  # fmt: skip
    with pytest.raises(ValueError, match=r"visible has the shape \(2, 7\)"):
        layer.attend(attend_records, visible=torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="visible has the dtype"):
        layer.attend(attend_records, visible=torch.ones(2, 1, 120))
    layer.addresses = layer.addresses.to("meta")
    with pytest.raises(ValueError, match=r"operands are on .*cpu.*meta.*, but must be on"):
        layer.attend(attend_records)


@pytest.mark.parametrize("num_bytes", [1, 6, 24, 40, 64, 4096 + 16, 33000])
def test_records_are_copied_between_addresses(num_bytes: int):
    """Of any alignment, into places that lie apart, and nothing beside them."""
    stride = num_bytes + 24
    source = torch.randint(0, 256, (5 * stride + 64,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    order = np.array([3, 0, 4, 1])
    sources = source.data_ptr() + np.arange(4) * stride
    destinations = target.data_ptr() + order * stride
    alignment = common_alignment(num_bytes, sources, destinations)
    table = torch.from_numpy(np.stack([destinations, sources]))
    copy_launch(table, num_bytes, alignment)()
    expected = torch.zeros_like(source)
    for i, place in enumerate(order.tolist()):
        begin = place * stride
        expected[begin : begin + num_bytes] = source[i * stride : i * stride + num_bytes]
    assert torch.equal(target, expected)


def test_the_alignment_is_that_of_all_addresses():
    some = np.array([64, 4096])
    assert common_alignment(96, some) == 16
    assert common_alignment(24, some) == 8
    assert common_alignment(96, some, np.array([4])) == 4
    assert common_alignment(96, some, np.array([33])) == 1
