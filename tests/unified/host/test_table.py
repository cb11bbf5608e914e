"""Rows by C++ and by torch against plain indexing: equal bit for bit, or the same error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.unified.host import table as host_table
from random_rows import DTYPES, noise, same_bits

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WIDTHS = [1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 600, 4096, 16384]


@pytest.fixture(params=["cpp", "torch"])
def backend(request, monkeypatch):
    """Both ways; the first one skips nothing, because the tests need a compiler anyway."""
    if request.param == "torch":
        monkeypatch.setattr(host_table, "_library", lambda: None)
    assert host_table.backend() == request.param
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_copies_bits(backend, dtype, width):
    count = 300 if width < 1000 else 40
    table = noise(50, width, dtype=dtype)
    index = torch.randint(0, 50, (count,))
    out = torch.empty(count, width, dtype=dtype)
    host_table.read_rows(table, index, out)
    assert same_bits(out, table[index])


@pytest.mark.parametrize("num_bytes", [1 << 16, (1 << 20) + 640, 5 << 19])
@pytest.mark.parametrize("width", [64, 65, 160, 161, 1000, 1024, 40_001, 70_016])
def test_large_results_with_all_threads_and_past_the_caches(backend, num_bytes, width, monkeypatch):
    monkeypatch.setattr(host_table, "_STREAM_BYTES", 1 << 20)
    check_large_result(num_bytes, width)


def test_results_larger_than_the_caches_are_streamed(backend):
    check_large_result((8 << 20) + 640, 160)


def check_large_result(num_bytes: int, width: int) -> None:
    num_rows = 1000 if width <= 1024 else 40
    table = torch.randint(0, 256, (num_rows, width), dtype=torch.uint8)
    index = torch.randint(0, num_rows, (num_bytes // width,))
    storage = torch.zeros(len(index) * width + 64, dtype=torch.uint8)
    for shift in (0, 13):
        out = storage[shift : shift + len(index) * width].view(-1, width)
        host_table.read_rows(table, index, out)
        assert torch.equal(out, table[index])


@given(
    num_rows=st.integers(1, 40),
    row=st.lists(st.integers(1, 5), max_size=3),
    indices=st.lists(st.integers(-60, 60), max_size=50),
    index_dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8]),
    negative=st.booleans(),
    step=st.integers(1, 3),
)
def test_gather_is_indexing_or_names_the_index(num_rows, row, indices, index_dtype, negative, step):
    table = torch.arange(num_rows * step * 2 * 120).view(num_rows * step, -1)[::step]
    width = 1
    for length in row:
        width *= length
    table = table[:, 3 : 3 + width].unflatten(1, row or [1])
    index = torch.tensor(indices, dtype=index_dtype)
    out = torch.zeros(len(indices), *table.shape[1:], dtype=table.dtype)
    low = -num_rows if negative else 0
    wrong = [at for at, each in enumerate(indices) if not low <= each < num_rows]
    if wrong:
        named = rf"index\[{wrong[0]}\] is {indices[wrong[0]]}, but the table has {num_rows} rows"
        with pytest.raises(IndexError, match=named):
            host_table.read_rows(table, index, out, negative=negative)
    else:
        host_table.read_rows(table, index, out, negative=negative)
        assert torch.equal(out, table[index.long()])


def test_the_first_of_several_wrong_indices_is_named_whatever_thread_meets_it(backend):
    table, index = torch.zeros(100, 64), torch.randint(0, 100, (100_000,))
    index[[70_000, 99_999, 30_001]] = torch.tensor([100, -1, 1 << 40])
    with pytest.raises(IndexError, match=rf"index\[30001\] is {1 << 40}"):
        host_table.read_rows(table, index, torch.empty(100_000, 64))


@pytest.mark.parametrize("width", [128, 129])
def test_wrong_indices_of_large_results_are_named(backend, width):
    table, index = torch.zeros(100, width, dtype=torch.uint8), torch.randint(0, 100, (100_000,))
    index[[99_999, 4711]] = torch.tensor([100, -1])
    with pytest.raises(IndexError, match=r"index\[4711\] is -1"):
        host_table.read_rows(table, index, torch.empty(100_000, width, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (5, 2, 0)])
def test_empty_tables_and_rows(backend, shape):
    table = torch.zeros(shape)
    nothing = torch.empty(0, dtype=torch.int64)
    host_table.read_rows(table, nothing, torch.empty(0, *shape[1:]))
    host_table.write_rows(table, nothing, torch.empty(0, *shape[1:]))
    host_table.add_rows(table, nothing, torch.empty(0, *shape[1:]))
    if shape[0] == 0:
        with pytest.raises(IndexError, match="the table has 0 rows"):
            host_table.read_rows(table, torch.tensor([0]), torch.empty(1, *shape[1:]))


@pytest.mark.parametrize("width", [1, 3, 16, 100])
@pytest.mark.parametrize("num_indices", [10, 5000])
def test_put_keeps_the_last_of_several(backend, width, num_indices):
    table = torch.zeros(64, width)
    index = torch.randint(-64, 64, (num_indices,))
    source = torch.randn(num_indices, width)
    expected = table.clone()
    for at, row in enumerate(index.tolist()):
        expected[row] = source[at]
    host_table.write_rows(table, index, source, negative=True)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64], ids=str)
def test_dtypes_that_torch_does_not_copy_are_put_and_gathered(backend, dtype):
    table, index = noise(50, 3, dtype=dtype), torch.tensor([7, 2, 7])
    rows, out = noise(3, 3, dtype=dtype), torch.empty(3, 3, dtype=dtype)
    host_table.write_rows(table, index, rows)
    host_table.read_rows(table, index, out)
    assert same_bits(out, torch.stack([rows[2], rows[1], rows[2]]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.complex64], ids=str)
@pytest.mark.parametrize("alpha", [1, -3])
@pytest.mark.parametrize("width", [1, 7, 64, 257])
def test_add_is_index_add(backend, dtype, alpha, width):
    table = torch.randn(64, width).mul(100).to(dtype)
    index = torch.randint(0, 64, (5000,))
    source = torch.randn(5000, width).mul(10).to(dtype)
    expected = table.clone().index_add_(0, index, source, alpha=alpha)
    host_table.add_rows(table, index, source, alpha=alpha)
    assert same_bits(table, expected)


@pytest.mark.parametrize("alpha", [0.1, -1e-3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_with_a_fraction_is_index_add(backend, dtype, alpha):
    table, source = torch.randn(16, 33).to(dtype), torch.randn(40, 33).to(dtype)
    index = torch.randint(0, 16, (40,))
    expected = table.clone().index_add_(0, index, source, alpha=alpha)
    host_table.add_rows(table, index, source, alpha=alpha)
    assert same_bits(table, expected)


@pytest.mark.parametrize("write", [host_table.write_rows, host_table.add_rows])
def test_nothing_is_written_if_an_index_is_wrong(backend, write):
    table = torch.zeros(8, 4)
    with pytest.raises(IndexError, match=r"index\[2\] is 8"):
        write(table, torch.tensor([0, 1, 8]), torch.ones(3, 4))
    assert not table.any()


def test_special_values_are_added_as_torch_adds_them(backend):
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45])
    for dtype in FLOATS:
        table = special.repeat(7, 1).to(dtype)
        source = special[:, None].repeat(1, 7).to(dtype)
        expected = table.clone().index_add_(0, torch.arange(7), source)
        host_table.add_rows(table, torch.arange(7), source)
        assert torch.equal(table.isnan(), expected.isnan())
        assert torch.equal(table.nan_to_num(), expected.nan_to_num())


def test_without_a_compiler_it_is_torch_and_said_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    host_table._library.cache_clear()
    with caplog.at_level("INFO", logger="penstock"):
        assert [host_table.backend(), host_table.backend()] == ["torch", "torch"]
    host_table._library.cache_clear()
    assert len([each for each in caplog.records if "gathered by torch" in each.message]) == 1
