"""Attention over records by address: the C++ kernel and torch's way against float64."""

from __future__ import annotations

import ctypes
import logging
import mmap

import numpy as np
import pytest
import torch

from penstock.kv import _kernel
from penstock.kv._kernel import RecordAttention, attend_records, copy_pieces
from record_layer import BRAIN, FLOAT, HALF, Layer, assert_close


@pytest.fixture(params=["C++", "torch"])
def way(request, monkeypatch):
    """Both ways to the result."""
    if request.param == "torch":
        monkeypatch.setattr(_kernel, "_library", lambda: None)
    else:
        assert _kernel._library() is not None
    return request.param


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(8, 8), (1, 3), (20, 40), (64, 64), (80, 100), (128, 128), (192, 128), (256, 250), (33, 31)],
)
def test_dims(dtype, key_dim, value_dim, way):
    for group, num_tokens in ((1, 1), (4, 1), (3, 1)):
        layer = Layer(
            group=group,
            num_tokens=num_tokens,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )
        assert_close(layer.attend(with_block_lse=True), layer.formula())


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_groups_and_tokens(group, num_tokens, way):
    layer = Layer(group=group, num_tokens=num_tokens, key_dim=40, value_dim=24)
    assert_close(layer.attend(with_block_lse=True), layer.formula())


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 64, 100, 1500])
def test_records_of_other_lengths_and_many_tasks(block_tokens):
    layer = Layer(block_tokens=block_tokens, num_records=max(2, 4500 // block_tokens), group=2)
    assert_close(layer.attend(with_block_lse=True), layer.formula())


@pytest.mark.parametrize("number", range(25))
def test_every_count(number, way):
    layer = Layer(counts=torch.full((1, 2, 3), number, dtype=torch.int32), batch=1, num_records=3)
    out, lse, block_lse = layer.attend(with_block_lse=True)
    if number > 0:
        assert_close((out, lse, block_lse), layer.formula())
    else:
        assert torch.equal(out, torch.zeros_like(out))
        assert (lse == -torch.inf).all() and (block_lse == -torch.inf).all()


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_bias_and_visible_by_head(softcap, way):
    layer = Layer(group=4, num_tokens=3, key_dim=24, num_records=6)
    heads = layer.query.shape[1]
    bias = torch.randn(layer.batch, heads, 3, layer.num_scores())
    visible = torch.rand(layer.batch, layer.kv_heads, 3, layer.num_scores()) < 0.5
    visible[1, 1, 2] = False  # one row sees nothing, another record is hidden from all
    visible[..., layer.block_tokens : 2 * layer.block_tokens] = False
    options = {"softcap": softcap, "scale": 1.5}
    expected = layer.formula(**options, visible=visible, bias=bias)
    found = layer.attend(**options, visible=visible, bias=bias, with_block_lse=True)
    assert_close(found, expected)
    assert torch.equal(found[0][1, 4:, 2], torch.zeros_like(found[0][1, 4:, 2]))
    assert (found[1][1, 4:, 2] == -torch.inf).all()


def test_masks_and_bias_of_three_dimensions_and_other_strides(way):
    layer = Layer(group=2, num_tokens=4)
    bias = torch.randn(layer.num_scores(), 4, 4).permute(1, 2, 0)
    visible = torch.rand(layer.batch, 8, layer.num_scores())[:, ::2] < 0.7
    expected = layer.formula(bias=bias, visible=visible[:, None])
    assert_close(layer.attend(bias=bias, visible=visible)[:2], expected[:2])
    one_row = bias[:1, :1]  # of all heads and tokens
    assert_close(layer.attend(bias=one_row)[:2], layer.formula(bias=one_row)[:2])


def test_small_scores_keep_their_precision_under_a_softcap():
    layer = Layer(key_dim=32, num_tokens=2)
    options = {"scale": 1e-3, "softcap": 50.0}
    assert_close(layer.attend(**options)[1:2], layer.formula(**options)[1:2])


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize("group", [1, 4])
def test_threads_do_not_change_a_bit(dtype, group):
    layer = Layer(group=group, num_records=60, block_tokens=64, key_dim=48, batch=1, dtype=dtype)
    before = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(layer.attend(with_block_lse=True))
    finally:
        torch.set_num_threads(before)
    assert_close(found[0], layer.formula())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_exponentials_are_those_of_float64():
    """A record of one token at 0 beside one at x: their log-sum-exps differ by log(exp(x))."""
    x = -torch.cat([torch.linspace(0, 86, 4001), torch.logspace(-8, 0, 500)])
    records = torch.zeros(2, 2)
    records[0, 1], records[1] = 0.0, torch.tensor([1.0, 1.0])
    addresses = records.data_ptr() + 8 * torch.arange(2).view(1, 1, 2)
    out, _, _ = attend_records(
        x.view(1, 1, -1, 1),
        addresses,
        torch.ones(1, 1, 2, dtype=torch.int32),
        block_tokens=1,
        value_dim=1,
        scale=1.0,
    )
    power = out.flatten().double()  # exp(x) / (1 + exp(x))
    expected = torch.sigmoid(x.double())
    assert float(((power - expected) / expected).abs().max()) < 3e-7


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("value_dim", [32, 7])
def test_every_finite_number_of_two_bytes_is_read_exactly(dtype, value_dim):
    """The output of a record of one token is its value."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = numbers[numbers.isfinite()]
    values = values[: len(values) // value_dim * value_dim].view(-1, value_dim)
    records = torch.cat([torch.zeros(len(values), 1, dtype=dtype), values], 1)
    addresses = records.data_ptr() + records[0].nbytes * torch.arange(len(records))
    out, _, _ = attend_records(
        torch.ones(len(records), 1, 1, 1),
        addresses.view(-1, 1, 1),
        torch.ones(len(records), 1, 1, dtype=torch.int32),
        block_tokens=1,
        value_dim=value_dim,
        scale=1.0,
        dtype=dtype,
    )
    assert torch.equal(out[:, 0, 0], values.float())


def test_large_scores_and_shares_that_vanish(way):
    layer = Layer(num_tokens=3, key_dim=16, num_records=4)
    layer.query *= 200.0
    out, lse, block_lse = layer.attend(with_block_lse=True)
    expected = layer.formula()
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=2e-4)
    torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=1e-3)
    shares = (block_lse.double() - lse.double()[..., None]).exp()
    torch.testing.assert_close(
        shares, (expected[2] - expected[1][..., None]).exp(), rtol=0, atol=4e-4
    )


def test_maxima_of_tasks_far_apart():
    """Sums of a task are relative to its own maximum; others would overflow in the merge."""
    layer = Layer(num_records=130, num_tokens=2)
    bias = torch.linspace(0, 500, layer.num_scores()).expand(2, 2, -1)
    for shift in (bias, bias.flip(-1)):
        found, expected = layer.attend(bias=shift), layer.formula(bias=shift)
        torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=2e-4)


def test_nothing_is_read_beyond_a_record():
    """The record ends where the mapping does; reading the page after it would kill the process."""
    layer = Layer(
        batch=1, kv_heads=1, num_records=1, block_tokens=3, counts=torch.full((1, 1, 1), 3).int()
    )
    mapping = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    guard, length = ctypes.c_void_p(start + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(guard, length, 0) == 0
    address = start + mmap.PAGESIZE - layer.memory.nbytes
    ctypes.memmove(address, layer.memory.data_ptr(), layer.memory.nbytes)
    layer.addresses = torch.tensor([[[address]]])
    expected = layer.formula()
    for group in (1, 2, 4):
        layer.group, layer.query = group, layer.query[:, :1].repeat(1, group, 1, 1)
        assert_close(
            layer.attend()[:2], [each.repeat_interleave(group, 1) for each in expected[:2]]
        )


def test_nan_and_infinity_are_not_lost(way):
    layer = Layer(batch=1, kv_heads=1)
    layer.query[..., 0] = torch.nan
    out, lse, _ = layer.attend()
    assert out.isnan().all() and lse.isnan().all()


def test_no_records_and_empty_batches(way):
    layer = Layer()
    for records, batch in ((0, 2), (5, 0)):
        out, lse, block_lse = attend_records(
            layer.query[:batch],
            layer.addresses[:batch, :, :records],
            layer.counts[:batch, :, :records],
            block_tokens=24,
            value_dim=16,
            scale=1.0,
            with_block_lse=True,
        )
        assert out.shape == (batch, 2, 1, 16) and not out.any()
        assert (lse == -torch.inf).all()
        assert block_lse is not None and block_lse.shape == (batch, 2, 1, records)


def test_memory_of_no_alignment(way):
    """Records at any address: a prefix is mapped from a file where it lies."""
    layer = Layer(batch=1, kv_heads=1, num_records=1, dtype=HALF)
    memory = ctypes.create_string_buffer(layer.memory.nbytes + 2)
    address = ctypes.addressof(memory) + 2
    ctypes.memmove(address, int(layer.addresses[0, 0, 0]), layer.memory.nbytes)
    expected = layer.attend()
    layer.addresses = torch.tensor([[[address]]])
    assert all(torch.equal(a, b) for a, b in zip(layer.attend()[:2], expected[:2], strict=True))


def test_half_precision_queries_name_the_records_dtype():
    layer = Layer(dtype=BRAIN)
    layer.query = layer.query.bfloat16()
    out, _, block_lse = attend_records(
        layer.query, layer.addresses, layer.counts, block_tokens=24, value_dim=16, scale=0.25
    )
    assert out.dtype == FLOAT and block_lse is None
    assert_close([out], layer.formula()[:1])


def test_what_cannot_be_read_is_refused_by_name():
    layer = Layer()
    where = {"block_tokens": 24, "value_dim": 16, "scale": 1.0}
    query, addresses, counts = layer.query, layer.addresses, layer.counts
    assert counts is not None
    with pytest.raises(TypeError, match=r"records have torch.float64.*convert them"):
        attend_records(query.double(), addresses, counts, **where)
    with pytest.raises(TypeError, match=r"addresses have the dtype torch.int32"):
        attend_records(query, addresses.int(), counts, **where)
    with pytest.raises(TypeError, match=r"counts torch.int64"):
        attend_records(query, addresses, counts.long(), **where)
    with pytest.raises(ValueError, match=r"between 0 and 25.*block_tokens, 24"):
        attend_records(query, addresses, counts.clamp(max=0).index_fill(2, torch.tensor(0), 25),
                       **where)  # fmt: skip
    with pytest.raises(ValueError, match="between -1"):
        attend_records(query, addresses, counts - counts - 1, **where)
    with pytest.raises(ValueError, match=r"3 heads in a batch of 2.*multiple"):
        attend_records(torch.ones(2, 3, 1, 16), addresses, counts, **where)
    with pytest.raises(ValueError, match="counts"):
        attend_records(query, addresses, counts[:1], **where)
    with pytest.raises(ValueError, match=r"must be on the CPU"):
        attend_records(query.to("meta"), addresses, counts, **where)
    with pytest.raises(ValueError, match="value_dim 0"):
        attend_records(query, addresses, counts, **{**where, "value_dim": 0})
    with pytest.raises(ValueError, match=r"visible has the shape \(2, 7\)"):
        layer.attend(visible=torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"bias has the shape \(2, 1, 9\).*\(2, 1, 120\)"):
        layer.attend(bias=torch.ones(2, 1, 9))
    with pytest.raises(TypeError, match="visible has the dtype"):
        layer.attend(visible=torch.ones(2, 1, 120))


def test_without_a_compiler_torch_does_it_and_says_so_once(monkeypatch, caplog):
    from penstock.codegen import _load
    from penstock.errors import BuildError

    def fail(*_, **__):
        raise BuildError("there is no compiler")

    monkeypatch.setattr(_load, "build_library", fail)
    _kernel._library.cache_clear()
    try:
        layer = Layer(num_tokens=2)
        with caplog.at_level(logging.INFO, logger="penstock"):
            for _ in range(2):
                assert_close(layer.attend()[:2], layer.formula()[:2])
    finally:
        _kernel._library.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "attention over records of a KV cache is computed by torch, slower: there is no compiler"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_to_the_whole(way, dtype):
    case = Layer(num_records=5, dtype=dtype)
    case.counts[0, 0] = 0  # a head that sees nothing until the tokens of the last part
    case.counts[0, 0, 4] = 3
    expected = case.attend()
    call = RecordAttention(case.query, dtype, case.block_tokens, case.value_dim, case.scale, None)
    assert not call.has_parts
    for some in (slice(0, 2), slice(2, 3), slice(3, 3), slice(3, 5)):
        call.add(case.addresses[..., some], case.counts[..., some])
    torch.testing.assert_close((call.out, call.lse), expected[:2], rtol=1e-5, atol=1e-5)


def test_counts_of_a_part_are_checked(way):
    case = Layer()
    call = RecordAttention(
        case.query, case.dtype, case.block_tokens, case.value_dim, case.scale, None
    )
    for wrong in (-1, case.block_tokens + 1):
        with pytest.raises(ValueError, match="counts are between"):
            call.add(case.addresses, torch.full_like(case.counts, wrong))


@pytest.mark.parametrize("num_bytes", [1, 100, 40_000])
def test_pieces_are_copied(way, num_bytes):
    source = torch.randint(0, 256, (64, num_bytes), dtype=torch.uint8)
    copy = torch.zeros_like(source)
    order = np.random.default_rng(0).permutation(64)
    at = np.arange(64) * num_bytes
    copy_pieces(copy.data_ptr() + at, source.data_ptr() + at[order], num_bytes)
    assert torch.equal(copy, source[order])
