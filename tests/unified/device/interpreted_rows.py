"""What `test_rows.py` runs in a process of its own, where Triton interprets its kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_bytes.rows import added_bytes, copied_bytes
from penstock.codegen import count_bytes
from penstock.unified import HotRows, unify
from penstock.unified.device import _rows as device_rows
from penstock.unified.device._registration import MemoryUse
from penstock.unified.device.table import DeviceTable, IndexCheck
from penstock.unified.host import table as host_table
from random_rows import DTYPES, noise, same_bits

assert os.environ.get("TRITON_INTERPRET") == "1", "test_rows.py runs this"

pytestmark = pytest.mark.usefixtures("interpreter_of_triton")

CPU = torch.device("cpu")
WIDTHS = [1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 513, 600, 2053]
# Rows are copied as bytes: each number of bytes once (not as bools, of which seven bits are zero),
# and each dtype once.
ROWS = {
    width * dtype.itemsize: (width, dtype)
    for width in WIDTHS
    for dtype in DTYPES
    if dtype != torch.bool
}


def none_wrong() -> torch.Tensor:
    return torch.tensor(torch.iinfo(torch.int64).max)


# ------------------------------------------------------------------ gather and put


@pytest.mark.parametrize(("width", "dtype"), [*ROWS.values(), *((33, each) for each in DTYPES)])
def test_rows_are_copied_bit_by_bit(width, dtype):
    table = unify(noise(40, width, dtype=dtype)).cpu()
    index = torch.randint(0, 40, (50,), dtype=torch.int32 if width % 2 else torch.int64)
    out = noise(51, width, dtype=dtype)
    behind = out[50].clone()
    device_rows.read_rows(table, index, out[:50], first_wrong=none_wrong())
    assert same_bits(out[:50], table[index.long()])
    assert same_bits(out[50], behind)
    source = noise(50, width, dtype=dtype)
    expected = table.clone()
    host_table.write_rows(expected, index, source)
    device_rows.write_rows(table, index, source)
    assert same_bits(table, expected)


def test_of_several_for_one_row_only_the_last_is_written(monkeypatch):
    """On a GPU nobody knows which of two writers comes last."""
    written = []
    copy = device_rows.copy_rows
    monkeypatch.setattr(
        device_rows, "copy_rows", lambda *args: (written.append((args[1], args[3])), copy(*args))
    )
    table, source = torch.zeros(10, 3), torch.randn(6, 3)
    device_rows.write_rows(table, torch.tensor([4, 2, 4, -1, 2, 4]), source, negative=True)
    ((places, rows),) = written
    assert sorted(zip(rows.tolist(), places.tolist(), strict=True))[-3:] == [(2, 4), (4, 5), (9, 3)]
    assert (rows >= 0).sum() == 3
    assert torch.equal(table[[2, 4, 9]], source[[4, 5, 3]])


def test_the_widest_rows():
    table = unify(noise(7, 16384, dtype=torch.int8)).cpu()
    index = torch.tensor([6, 0, 6])
    out = torch.empty(3, 16384, dtype=torch.int8)
    device_rows.read_rows(table, index, out, first_wrong=none_wrong())
    assert torch.equal(out, table[index])


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8, 12, 16, 20])
@pytest.mark.parametrize("width", [4, 15, 16, 64, 132, 144, 160, 257, 272, 2064])
def test_memory_may_begin_anywhere(width, shift):
    bytes_of = torch.randint(0, 256, (40 * width + 64,), dtype=torch.uint8)
    index = torch.randint(0, 30, (20,))
    expected = bytes_of[: 30 * width].view(30, width)[index]
    out = torch.zeros(20 * width + 64, dtype=torch.uint8)
    place = out[shift : shift + 20 * width].view(20, width)
    device_rows.read_rows(bytes_of[: 30 * width].view(30, width), index, place)
    assert torch.equal(place, expected)
    assert not out[:shift].any() and not out[shift + 20 * width :].any()
    moved = torch.zeros(31 * width + 64, dtype=torch.uint8)
    table = moved[shift : shift + 30 * width].view(30, width)
    table.copy_(bytes_of[: 30 * width].view(30, width))
    device_rows.read_rows(table, index, place.zero_())
    assert torch.equal(place, expected)
    device_rows.write_rows(table, index.unique(), place[: len(index.unique())])
    kept = torch.ones(30, dtype=torch.bool)
    kept[index] = False
    assert torch.equal(table[index.unique()], place[: len(index.unique())])
    assert torch.equal(table[kept], bytes_of[: 30 * width].view(30, width)[kept])
    assert not moved[:shift].any() and not moved[shift + 30 * width :].any()


@given(
    num_rows=st.integers(1, 40),
    row=st.lists(st.integers(1, 5), max_size=3),
    indices=st.lists(st.integers(-60, 60), min_size=1, max_size=50),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
    negative=st.booleans(),
)
def test_wrong_indices_become_zeroes_and_the_first_is_named(
    num_rows, row, indices, index_dtype, negative
):
    table = 1 + torch.arange(num_rows * 125).view(num_rows, -1)
    width = torch.Size(row).numel()
    table = table[:, :width].contiguous().view(num_rows, *row)
    index, first = torch.tensor(indices, dtype=index_dtype), none_wrong()
    out = torch.full((len(indices), *row), 7)
    device_rows.read_rows(table, index, out, negative=negative, first_wrong=first)
    low = -num_rows if negative else 0
    right = torch.tensor([low <= each < num_rows for each in indices])
    assert torch.equal(out[right], table[index[right].long()])
    assert not out[~right].any()
    assert int(first) == (
        torch.iinfo(torch.int64).max if right.all() else int((~right).nonzero()[0])
    )


@pytest.mark.parametrize("width", [3, 16, 40])
@pytest.mark.parametrize("max_programs", [0, 1, 3])
def test_few_programs_do_all_of_it(width, max_programs):
    table, index = torch.randn(100, width), torch.randint(0, 100, (2500,))
    out = torch.empty(2500, width)
    device_rows.read_rows(table, index, out, max_programs=max_programs)
    assert torch.equal(out, table[index])


@pytest.mark.parametrize("width", [1, 64])
def test_many_small_rows_are_sorted_and_put_back(width, monkeypatch):
    table, index, first = torch.randn(500, width), torch.randint(0, 500, (5000,)), none_wrong()
    index[[4000, 4321]] = torch.tensor([500, -1])
    seen = []
    copy = device_rows.copy_rows
    monkeypatch.setattr(device_rows, "copy_rows", lambda *args: (seen.append(args[1]), copy(*args)))
    out = torch.empty(5000, width)
    device_rows.read_rows(table, index, out, first_wrong=first)
    assert (seen[0].diff() >= 0).all()
    assert int(first) == 4000
    index[[4000, 4321]] = 0
    out[[4000, 4321]] = table[0]
    assert torch.equal(out, table[index])


@pytest.mark.parametrize("width", [5, 16])
def test_places_below_zero_are_passed_over(width):
    table, out = torch.randn(10, width), torch.zeros(4, width)
    index, places = torch.tensor([3, 99, 5]), torch.tensor([2, -1, 0])
    first = none_wrong()
    device_rows.read_rows(table, index, out, places=places, first_wrong=first)
    assert torch.equal(out[[2, 0]], table[[3, 5]]) and not out[[1, 3]].any()
    assert int(first) == torch.iinfo(torch.int64).max
    out.zero_()
    device_rows.read_rows(table, torch.tensor([-1, 4]), out[:2])  # a slot that is none
    assert torch.equal(out[1], table[4]) and not out[0].any()


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (5, 2, 0)])
def test_empty_tables_and_rows(shape):
    table, nothing = torch.zeros(shape), torch.empty(0, dtype=torch.int64)
    rows = torch.empty(0, *shape[1:])
    device_rows.read_rows(table, nothing, rows, first_wrong=none_wrong())
    device_rows.write_rows(table, nothing, rows)
    device_rows.add_rows(table, nothing, rows)
    device_rows.read_rows(table, torch.tensor([0, 7]), torch.ones(2, *shape[1:]))


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (5, 2, 0)])
def test_indices_of_rows_without_bytes_are_checked(registered, shape):
    on = unify(torch.zeros(shape))._table.device_table(CPU)
    wrong = int(shape[0] > 0)
    with pytest.raises(IndexError, match=rf"index\[{wrong}\] is {7 * wrong}, but"):
        on.read_rows(torch.tensor([0, 7]), torch.ones(2, *shape[1:]), negative=False)


@pytest.mark.parametrize("write", [device_rows.write_rows, device_rows.add_rows])
def test_nothing_is_written_if_an_index_is_wrong(write):
    table = torch.zeros(8, 4)
    with pytest.raises(IndexError, match=r"index\[2\] is 8, but the table has 8 rows"):
        write(table, torch.tensor([0, 1, 8]), torch.ones(3, 4))
    with pytest.raises(IndexError, match=r"index\[0\] is -1"):
        write(table, torch.tensor([-1, 1]), torch.ones(2, 4))
    with pytest.raises(IndexError, match=r"index\[1\] is -9"):
        write(table, torch.tensor([-8, -9]), torch.ones(2, 4), negative=True)
    assert not table.any()


# ----------------------------------------------------------------------------- add


def added(table, index, source, alpha):
    """Row after row; narrow floats in float32, rounded once."""
    narrow = table.dtype in (torch.float16, torch.bfloat16)
    total = table.float() if narrow else table.clone()
    for at, row in enumerate(index.tolist()):
        total[row] += (source[at].float() if narrow else source[at]) * alpha
    return total.to(table.dtype)


@pytest.mark.parametrize("alpha", [1, -3, 0.1])
@pytest.mark.parametrize("width", [1, 7, 64, 1030])
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != torch.bool], ids=str)
def test_add_is_addition_in_the_order_of_the_index(dtype, width, alpha):
    if alpha == 0.1 and not (dtype.is_floating_point or dtype.is_complex):
        pytest.skip("integers are multiplied by integers")
    if dtype == torch.uint8:
        alpha = abs(alpha)
    table = torch.randn(7, width).mul(10).to(dtype)
    index, source = torch.randint(-7, 7, (32,)), torch.randn(32, width).mul(10).to(dtype)
    expected = added(table, index, source, alpha)
    device_rows.add_rows(table, index, source, alpha=alpha, negative=True)
    if dtype == torch.bfloat16:  # the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(table, expected, rtol=2**-7, atol=0)
    else:
        assert same_bits(table, expected)


def test_a_row_that_everybody_adds_to():
    table, index = torch.zeros(3, 5), torch.ones(700, dtype=torch.int32)
    device_rows.add_rows(table, index, torch.ones(700, 5))
    assert table[1].eq(700).all() and not table[[0, 2]].any()


# ------------------------------------------------------------------------ operators


def test_operators_are_what_they_say():
    table, index = torch.randn(9, 6), torch.tensor([3, 1, 3])
    out, first = torch.zeros(3, 6), none_wrong()
    arguments = (table, index, out, None, first, False, True, 0)
    torch.library.opcheck(device_rows.copy_rows, arguments)
    arguments = (out, None, table, index, None, False, False, 0)
    torch.library.opcheck(device_rows.copy_rows, arguments)
    rows, order = index.sort(stable=True)
    torch.library.opcheck(device_rows.add_sorted_rows, (table, rows, order, out))


# --------------------------------------------------------------------------- tables


@pytest.fixture
def registered(monkeypatch):
    """Memory that the "GPU", which is this CPU, reads where it lies."""

    monkeypatch.setattr(MemoryUse, "register", lambda use, device: True)


@pytest.mark.parametrize("cache", [None, "4KiB", "scores"])
@pytest.mark.parametrize("width", [3, 16])
def test_a_table_is_read_through_its_kernels_and_its_cache(registered, cache, width):
    u = unify(torch.randn(200, width))
    scores = torch.rand(200)
    hot = HotRows("4KiB", scores=scores) if cache == "scores" else cache and HotRows(cache)
    table = u._table.view_from(CPU, hot)
    on = table.device_table(CPU)
    assert isinstance(on, DeviceTable) and on.method == "triton"
    weights = torch.arange(1, 201).reciprocal()
    for step in range(30):
        index = weights.multinomial(60, replacement=True)
        out = torch.full((60, width), float("nan"))
        on.read_rows(index - 200 * (step % 2), out, negative=True)
        assert torch.equal(out, u.cpu()[index])
        if step % 10 == 4:
            u.index_add_(0, index, torch.ones(60, width))
        if step % 10 == 7:
            on.write_rows(index[:5], torch.randn(5, width), alpha=None, negative=False)
            table.use.mark_written(index[:5], u._version - 1)
        if step % 10 == 9:
            u.mul_(0.5)  # of which no cache is told
    hits, misses = on.count_hits()
    assert (hits > 0 and misses > 0) if cache else (hits, misses) == (0, 0)


def test_rows_on_their_way_and_wrong_indices(registered):
    u = unify(torch.randn(50, 6))
    on, stream = u._table.device_table(CPU), torch.cpu.current_stream()
    index = torch.tensor([[3, 1], [3, 49]])
    assert torch.equal(on.start_read(index, stream).result(), u.cpu()[index])
    pending = on.start_read(torch.tensor([[7, 50]]), stream)
    assert pending.done()
    with pytest.raises(IndexError, match=r"index\[0\]\[1\] is 50"):
        pending.result()
    with pytest.raises(IndexError, match=r"index\[1\] is -51"):
        on.read_rows(torch.tensor([-50, -51]), torch.empty(2, 6), negative=True)


def test_a_check_names_what_a_kernel_found():
    first, index = torch.tensor(3), torch.tensor([[0, 1], [2, 77]])
    for follow in (False, True):
        check = IndexCheck(index, first, 50)
        if follow:
            check.copy_to_host(torch.cpu.current_stream())
        assert check.done()
        with pytest.raises(IndexError, match=r"index\[1\]\[1\] is 77, but the table has 50 rows"):
            check.raise_if_wrong()
    IndexCheck(index, torch.tensor(torch.iinfo(torch.int64).max), 50).raise_if_wrong()


def test_the_next_use_of_a_table_raises_for_what_nobody_waited_for(registered):
    u = unify(torch.randn(50, 6))
    on = u._table.device_table(CPU)
    check = IndexCheck(torch.tensor([50]), torch.tensor(0), 50)
    on.defer_check(check)
    with pytest.raises(IndexError, match=r"index\[0\] is 50"):
        u.report()
    u.report()
    on.defer_check(check)
    with pytest.raises(IndexError, match=r"index\[0\] is 50"):
        on.read_rows(torch.tensor([1]), torch.empty(1, 6), negative=False)


# --------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("width", "dtype"), [*ROWS.values()])
def test_copies_ask_for_the_bytes_of_the_formula(width, dtype):
    table = unify(noise(40, width, dtype=dtype)).cpu()
    out = noise(60, width, dtype=dtype)
    index = torch.randint(-40, 44, (50,))
    places = torch.randperm(60)[:50]
    places[::7] = -1
    rows = index.clamp(max=39)
    for arguments, keywords in (
        ((table, index, out, None, none_wrong(), True, True, 0), {"negative": True}),
        ((table, rows, out, places, None, False, True, 3), {}),
        (
            (out, places, table, rows, None, False, False, 0),
            {"host_is_source": False},
        ),
        ((table, None, out, None, None, False, True, 0), {}),
    ):
        count = count_bytes(lambda: device_rows.copy_rows(*arguments))  # noqa: B023
        is_checked = arguments[4] is not None
        assert count == copied_bytes(*arguments[:4], is_checked=is_checked, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("width", [1, 33, 1100])
def test_additions_ask_for_the_bytes_of_the_formula(width, dtype):
    table, source = torch.ones(20, width, dtype=dtype), torch.ones(30, width, dtype=dtype)
    rows, order = torch.sort(torch.randint(0, 9, (30,)), stable=True)
    count = count_bytes(lambda: device_rows.add_sorted_rows(table, rows, order, source))
    assert count == added_bytes(table, rows, order, source)


def test_nothing_is_asked_for_without_rows():
    table = torch.zeros(5, 3)
    none = torch.zeros(0, dtype=torch.int64)
    assert added_bytes(table, none, none, table[:0]).requested_bytes == 0
    assert copied_bytes(table, none, table, None).requested_bytes == 0
