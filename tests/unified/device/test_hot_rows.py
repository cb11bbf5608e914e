"""What is kept on the device: the rows that are wanted most, with the content that they have now.

The "device" is the CPU; nothing in the cache knows the difference.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.unified import HotRows, empty, unify
from penstock.unified.device.hot_rows import RowCache

CPU = torch.device("cpu")
ROW = 4  # numbers of a row: 16 bytes


def budget(num_rows: int, capacity: int, row_bytes: int = 4 * ROW) -> int:
    """Bytes for a cache of `capacity` rows."""
    return 5 * (num_rows + 1) + (capacity + 1) * (row_bytes + 8)


class Fetching:
    """A table, and a cache before it as `DeviceTable` uses one."""

    def __init__(self, num_rows: int, capacity: int, scores: torch.Tensor | None = None) -> None:
        self.table = torch.randn(num_rows, ROW)
        hot_rows = HotRows(budget(num_rows, capacity), scores=scores)
        self.cache = RowCache(hot_rows, (num_rows, ROW), torch.float32, CPU)
        self.fetched: list[list[int]] = []

    def fetch(self, index: torch.Tensor, out: torch.Tensor) -> None:
        self.fetched.append(index.tolist())
        out.copy_(self.table[index])

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        self.cache.fill(self.fetch)
        found = self.cache.look_up(index)
        kept = found.slots >= 0
        out = torch.empty(len(index), ROW)
        out[found.order[kept]] = self.cache.rows[found.slots[kept].long()]
        out[found.order[~kept]] = self.table[found.rows[~kept]]
        self.cache.admit(found, out)
        return out

    def kept(self) -> list[int]:
        rows = self.cache._row_of_slot[:-1]
        return sorted(rows[rows >= 0].tolist())


def test_the_budget_pays_for_rows_and_for_finding_them():
    cache = RowCache(HotRows(budget(1000, 17)), (1000, ROW), torch.float32, CPU)
    assert cache.capacity == 17
    taken = sum(each.numel() * each.element_size() for each in cache.tensors)
    assert taken <= budget(1000, 17) + 16  # the two counters
    everything = RowCache(HotRows("1MiB"), (1000, ROW), torch.float32, CPU)
    assert everything.capacity == 1000
    with pytest.raises(ValueError, match=r"cache=4\.88 KiB: finding the hot ones among 1000 rows"):
        RowCache(HotRows(5000), (1000, ROW), torch.float32, CPU)


def test_hits_and_misses_are_different_rows_of_a_batch():
    it = Fetching(100, 50)
    it.gather(torch.tensor([3, 3, 3, 8]))
    assert it.cache.count_hits() == (0, 2)
    it.gather(torch.tensor([8, 9, 8, 3, 3]))
    assert it.cache.count_hits() == (2, 3)


def test_rows_that_batches_want_often_stay_and_others_pass():
    it = Fetching(1000, 10)
    generator = torch.Generator().manual_seed(0)
    hot = torch.arange(0, 1000, 125)  # 8 rows, in every batch
    for _ in range(60):
        others = torch.randint(0, 1000, (40,), generator=generator)
        it.gather(torch.cat([hot, others]))
    assert set(hot.tolist()) <= set(it.kept())
    before = it.cache.count_hits()
    it.gather(hot)
    hits, misses = it.cache.count_hits()
    assert (hits - before[0], misses - before[1]) == (8, 0)


def test_one_batch_that_wants_a_row_many_times_is_one_batch():
    it = Fetching(100, 2)
    for _ in range(3):
        it.gather(torch.tensor([1, 2]))
    it.gather(torch.full((50,), 7))
    assert it.kept() == [1, 2]


def test_what_was_hot_once_is_forgotten():
    it = Fetching(1000, 4)
    for _ in range(100):
        it.gather(torch.arange(4))
    for _ in range(50):  # half as often, but lately
        it.gather(torch.arange(500, 504))
    assert it.kept() == [500, 501, 502, 503]


def test_rows_of_the_highest_scores_are_fetched_once_and_stay():
    scores = torch.zeros(100)
    scores[[7, 40, 99]] = torch.tensor([3.0, 1.0, 2.0])
    it = Fetching(100, 3, scores)
    for _ in range(5):
        index = torch.tensor([7, 5, 5, 99, 6])
        assert torch.equal(it.gather(index), it.table[index])
    assert it.kept() == [7, 40, 99] and [sorted(each) for each in it.fetched] == [[7, 40, 99]]
    assert it.cache.count_hits() == (10, 10)


@given(
    num_rows=st.integers(1, 60),
    share=st.floats(0.02, 1.0),
    is_static=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["gather", "gather", "write", "write behind its back"]),
            st.lists(st.integers(0, 59), max_size=40),
        ),
        max_size=12,
    ),
)
def test_whatever_happens_rows_are_what_the_table_holds(num_rows, share, is_static, steps):
    torch.manual_seed(num_rows)
    scores = torch.rand(num_rows) if is_static else None
    it = Fetching(num_rows, max(1, int(share * num_rows)), scores)
    for version, (step, numbers) in enumerate(steps):
        index = torch.tensor(numbers, dtype=torch.int64) % num_rows
        if step == "gather":
            if it.cache.version != version:
                it.cache.clear()
                it.cache.version = version
            assert torch.equal(it.gather(index), it.table[index])
            it.cache.version = version + 1
        else:
            it.table[index] = torch.randn(len(index), ROW)
            if step == "write":
                index = index - num_rows * (version % 2)
                it.cache.refresh(index, it.fetch, before=version, after=version + 1)
        slots = it.cache._slot_of_row[:-1]
        for row in (slots >= 0).nonzero().flatten().tolist():  # both maps say the same
            assert int(it.cache._row_of_slot[slots[row]]) == row
        assert len(it.kept()) == int((slots >= 0).sum())


def test_a_change_that_nobody_told_of_is_noticed_at_the_next_that_is_told():
    it = Fetching(100, 5)
    it.gather(torch.tensor([1, 2]))
    it.table[1] += 1  # the version is 1 now
    it.table[2] += 1
    it.cache.refresh(torch.tensor([2]), it.fetch, before=1, after=2)
    assert it.cache.version == 2
    assert torch.equal(it.gather(torch.tensor([1, 2])), it.table[[1, 2]])


def test_a_change_of_rows_that_are_not_kept_fetches_one_row_at_most():
    it = Fetching(100, 2)
    it.gather(torch.tensor([1, 2]))
    it.table[[2, 50, 60]] += 1
    it.cache.refresh(torch.tensor([50, 2, 60]), it.fetch)
    assert set(it.fetched[-1]) <= {2, 50}
    assert torch.equal(it.gather(torch.tensor([1, 2, 50])), it.table[[1, 2, 50]])


# ------------------------------------------------------------------------- of tables


@pytest.fixture(params=["memory", "file"])
def tables(request, tmp_path):
    """A table without a cache and the "GPU" table over it, which copies through buffers."""
    content = torch.randn(300, ROW)
    if request.param == "memory":
        u = unify(content)
        u._table.use.register = lambda device: False  # CUDA refuses
        return u, u._table.view_from(CPU, HotRows(budget(300, 40)))
    np.save(tmp_path / "x.npy", content.numpy())
    u = unify(tmp_path / "x.npy")
    u._table.hot_rows = HotRows(budget(300, 40))
    return u, u._table


def test_a_table_that_is_copied_through_buffers_has_a_cache_too(tables):
    u, table = tables
    on, expected = table.device_table(CPU), u.gather_rows(torch.arange(300))
    assert on.method == "staged"
    for step in range(20):
        index = torch.randint(0, 300, (5, 10)).pow(2) // 300
        out = torch.full((5, 10, ROW), float("nan"))
        on.read_rows(index - 300 * (step % 2), out, negative=True)
        assert torch.equal(out, expected[index])
        changed = index[0].unique()
        expected[changed] = torch.randn(len(changed), ROW)
        table.write_rows(changed, expected[changed], alpha=None, negative=False)
        with pytest.raises(IndexError, match=r"index\[1\]\[0\] is 300"):
            on.read_rows(torch.tensor([[0], [300]]), torch.empty(2, 1, ROW), negative=False)
    hits, misses = on.count_hits()
    assert hits > 0 and misses > 0
    assert (table.report().num_cache_hits, table.report().num_cache_misses) == (hits, misses)


def test_what_another_process_writes_to_the_file_is_not_kept(tmp_path):
    content = np.zeros((300, ROW), np.float32)
    np.save(tmp_path / "x.npy", content)
    table = unify(tmp_path / "x.npy")._table
    table.hot_rows = HotRows(budget(300, 40))
    index, out = torch.arange(30), torch.empty(30, ROW)
    for value in range(4):
        content[:] = value
        with open(tmp_path / "x.npy", "r+b") as file:  # as a process without this table's lock
            np.save(file, content)
        for _ in range(3):  # the last time all rows are there
            time.sleep(0.03)
            table.device_table(CPU).read_rows(index, out, negative=False)
            assert (out == value).all()
    assert table.device_table(CPU).count_hits()[0] >= 4 * 30


def test_a_write_through_another_tensor_over_the_table_is_seen():
    u = unify(torch.randn(50, ROW))
    u._table.use.register = lambda device: False
    one, other = (u._table.view_from(CPU, HotRows("1KiB")).device_table(CPU) for _ in range(2))
    index, out = torch.arange(20), torch.empty(20, ROW)
    for write in (lambda: u.index_add_(0, index, torch.ones(20, ROW)), lambda: u.mul_(3)):
        for on in (one, other):
            on.read_rows(index, out, negative=False)
            assert torch.equal(out, u.cpu()[:20])
        write()
    for on in (one, other):
        on.read_rows(index, out, negative=False)
        assert torch.equal(out, u.cpu()[:20])
    # All of the first batch were misses; what was added to stayed, what was multiplied did not.
    assert one.count_hits() == other.count_hits() == (20, 40)


def test_a_gather_in_flight_raises_when_it_is_waited_for():
    u = unify(torch.randn(50, ROW))
    u._table.use.register = lambda device: False
    on = u._table.device_table(CPU)
    stream = torch.cpu.current_stream()
    index = torch.tensor([[3, 1], [3, 49]])
    pending = on.start_read(index, stream)
    assert torch.equal(pending.result(), u.cpu()[index]) and pending.done()
    with pytest.raises(IndexError, match=r"index\[0\] is 50"):
        on.start_read(torch.tensor([50]), stream).result()


def test_a_script_for_a_gpu_runs_without_one(caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="penstock"):
        u = unify(torch.ones(10, 2), cache="1MiB")
        v = unify(torch.ones(10, 2), cache=HotRows("1MiB", scores=torch.arange(10)))
    assert caplog.text.count("a table in memory needs none") == 2
    assert u.report().cache_bytes == v.report().cache_bytes == 0
    assert u.report().device == "cpu" and u._table.hot_rows is None
    file = unify(empty((10, 2), path=tmp_path / "t"), cache=HotRows("1MiB"))
    assert file.report().cache_bytes == 2**20


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: HotRows(-1), ValueError, "budget must be"),
        (lambda: HotRows("1MiB", scores=torch.ones(2, 2)), ValueError, "one number for each row"),
        (
            lambda: unify(torch.ones(3, 1), cache=HotRows("1MiB", scores=torch.ones(4))),
            ValueError,
            "one for each of the table's 3 rows, got 4",
        ),
        (lambda: unify(torch.ones(3, 1), cache=1.5), TypeError, "cache must be"),
        (lambda: unify(torch.ones(3, 1), cache="lots"), ValueError, "cache must be"),
    ],
)
def test_what_makes_no_sense_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
