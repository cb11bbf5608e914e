"""Rows read page by page are the rows; the faster order is the one that large batches get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.unified import empty
from penstock.unified.host import _row_order
from penstock.unified.host._row_order import RowOrder
from penstock.unified.host.table import read_rows
from random_rows import noise, same_bits

TABLE = noise(70_000, 176, dtype=torch.uint8)  # of several huge pages


@settings(max_examples=40, deadline=None)
@given(
    row_bytes=st.sampled_from([64, 65, 128, 160, 176]),
    count=st.integers(0, 5000),
    gap=st.integers(0, 3),
    narrow=st.booleans(),
    negative=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_by_page_are_the_rows(
    row_bytes: int, count: int, gap: int, narrow: bool, negative: bool, seed: int
):
    table = TABLE[: 70_000 - seed % 1000, :row_bytes]
    generator = torch.Generator().manual_seed(seed)
    least = -len(table) if negative else 0
    index = torch.randint(least, len(table), (count,), generator=generator)
    memory = torch.zeros(count * row_bytes + 64, dtype=torch.uint8)
    out = memory[gap : gap + count * row_bytes].view(count, row_bytes)
    given_index = index.int() if narrow else index
    read_rows(table, given_index, out, negative=negative, by_page=True)
    assert same_bits(out, table[index])
    assert not memory[gap + count * row_bytes :].any()


def test_large_results_go_past_the_caches_and_are_sorted_in_several_windows():
    count = 150_000 * torch.get_num_threads()
    index = torch.randint(0, len(TABLE), (count,))
    table = TABLE[:, :64].contiguous()
    out = torch.empty(count, 64, dtype=torch.uint8)
    read_rows(table, index, out, by_page=True)
    assert same_bits(out, table[index])


@pytest.mark.parametrize("wrong", [-1, len(TABLE)])
def test_a_row_that_is_not_there_is_named(wrong: int):
    index = torch.zeros(20_000, dtype=torch.int64)
    index[12_345] = wrong
    with pytest.raises(IndexError, match=rf"index\[12345\] is {wrong}, but"):
        read_rows(TABLE, index, torch.empty(20_000, 176, dtype=torch.uint8), by_page=True)


class Machine:
    """A clock, and batches that take as long as their order does."""

    def __init__(self, given_seconds: float, paged_seconds: float) -> None:
        self.now = 0.0
        self.seconds = given_seconds, paged_seconds
        self.orders: list[bool] = []

    def clock(self) -> float:
        return self.now

    def read(self, by_page: bool) -> None:
        self.orders.append(by_page)
        self.now += self.seconds[by_page]


@pytest.mark.parametrize(("seconds", "expected"), [((2.0, 1.0), True), ((1.0, 1.0), False)])
def test_the_faster_order_is_taken_after_both_were_tried(
    seconds: tuple[float, float], expected: bool
):
    machine = Machine(*seconds)
    order = RowOrder(2**22, 256, clock=machine.clock)
    for _ in range(6):
        order.read(10_000, machine.read)
        assert order.last == "measuring"
    assert sorted(machine.orders) == [False] * 3 + [True] * 3
    order.read(10_000, machine.read)
    assert machine.orders[-1] is expected
    assert order.last == ("by page" if expected else "as given")
    order.read(100_000, machine.read)  # another size is measured by itself
    assert order.last == "measuring"


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "count"),
    [(1000, 256, 10_000), (2**25, 32, 10_000), (2**22, 256, 1000), (2**33, 64, 10_000)],
)
def test_small_tables_rows_and_batches_are_read_as_given(num_rows, row_bytes, count):
    machine = Machine(2.0, 1.0)
    order = RowOrder(num_rows, row_bytes, clock=machine.clock)
    for _ in range(9):
        order.read(count, machine.read)
    assert machine.orders == [False] * 9 and order.last == "as given"


def test_a_table_reports_its_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_row_order, "_LEAST_TABLE_BYTES", 2**20)
    table = empty((10_000, 32), torch.float32, device="cpu")
    rows = noise(10_000, 32, dtype=torch.float32)
    table.cpu().copy_(rows)
    assert table.report().row_order == "as given"
    index = torch.randint(0, 10_000, (9_000,))
    for _ in range(6):
        assert same_bits(table.gather_rows(index), rows[index])
        assert table.report().row_order == "measuring"
    assert same_bits(table.gather_rows(index), rows[index])
    assert table.report().row_order in ("as given", "by page")
