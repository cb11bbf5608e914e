"""Caches: C++ and Python count the same lines, and known patterns miss as they must."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.iomodel import AccessTrace, declare_access, simulate_caches
from penstock.iomodel import _access as access_module
from penstock.iomodel._access import _simulate_by_cpp, _simulate_by_python, find_access

KIB = 1024


@settings(max_examples=60, deadline=None)
@given(
    accesses=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 300), st.booleans())),
    capacities=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    allocates=st.booleans(),
    is_warm=st.booleans(),
)
def test_cpp_counts_what_python_counts(accesses, capacities, allocates, is_warm):
    trace = AccessTrace()
    for begin, length, is_store in accesses:
        (trace.write if is_store else trace.read)(0, begin, length)
    arguments = (trace.arrays(), sorted(capacities), 64, allocates, is_warm)
    counted = _simulate_by_cpp(*arguments)
    assert counted == _simulate_by_python(*arguments)
    loaded, stored = counted
    assert loaded == sorted(loaded, reverse=True) and stored == sorted(stored, reverse=True)


def test_a_loop_that_fits_misses_once_and_one_that_does_not_always():
    trace = AccessTrace()
    for _ in range(5):
        trace.read(0, 0, 32 * KIB)
    small, large = simulate_caches(trace, [31 * KIB, 32 * KIB])
    assert small.loaded_bytes == 5 * 32 * KIB and large.loaded_bytes == 32 * KIB


def test_stores_load_their_line_and_leave_when_evicted():
    trace = AccessTrace()
    trace.write(0, 0, 8 * KIB)
    trace.write(0, 0, 8 * KIB)
    (small,) = simulate_caches(trace, [4 * KIB])
    assert (small.loaded_bytes, small.stored_bytes) == (16 * KIB, 16 * KIB)
    (large,) = simulate_caches(trace, [8 * KIB], allocates=False)
    assert (large.loaded_bytes, large.stored_bytes) == (0, 8 * KIB)


def test_what_fits_does_not_move_again_when_it_is_warm():
    trace = AccessTrace()
    trace.write(0, 0, 8 * KIB)
    small, large = simulate_caches(trace, [4 * KIB, 8 * KIB], is_warm=True)
    assert (small.loaded_bytes, small.stored_bytes) == (8 * KIB, 8 * KIB)
    assert large.moved_bytes == 0


def test_streams_are_read_in_step():
    left, right, out = torch.zeros(3, 5000)
    trace = AccessTrace()
    trace.stream([left, right], [out])
    assert (trace.read_bytes, trace.written_bytes) == (40_000, 20_000)
    begins, lengths, stores = trace.arrays()
    assert lengths.sum() == 60_000 and stores.sum() == len(stores) / 3
    firsts = begins[:3] - np.array([left.data_ptr(), right.data_ptr(), out.data_ptr()])
    assert firsts.tolist() == [0, 0, 0]
    AccessTrace().stream([torch.zeros(0)])


def test_rows_that_are_gathered_in_turn():
    table, out = torch.zeros(1000, 32), torch.zeros(100, 32)
    rows = np.arange(100) * 7 % 1000
    trace = AccessTrace()
    trace.interleave([(table, rows * 128, 128, False), (out, np.arange(100) * 128, 128, True)])
    (found,) = simulate_caches(trace, [KIB])
    assert 100 * 128 <= found.stored_bytes <= 100 * 128 + 64
    assert 200 * 128 <= found.loaded_bytes <= 200 * 128 + 101 * 64


def test_a_partial_function_declares_with_its_own_arguments():
    @declare_access(lambda trace, x, y, scale=1: trace.stream([x] * scale, [y]))
    def copy(x, y, scale=1):
        y.copy_(x)

    x, y = torch.zeros(2, 10)
    trace = AccessTrace()
    access = find_access(functools.partial(copy, x, scale=3))
    assert access is not None
    access(trace, y)
    assert trace.read_bytes == 120 and find_access(len) is None
    assert find_access(functools.partial(len)) is None


def test_a_method_declares_with_its_object():
    class Table:
        @declare_access(lambda trace, table, x: trace.read(x, 0, table.num_bytes))
        def read(self, x):
            return x

        num_bytes = 12

    trace, access = AccessTrace(), find_access(functools.partial(Table().read, torch.zeros(8)))
    assert access is not None
    access(trace)
    assert trace.read_bytes == 12


@pytest.mark.parametrize("num_bytes", [-5, [1, 2, 3], [4, -1]])
def test_ranges_that_do_not_fit_are_named(num_bytes):
    with pytest.raises(ValueError, match="for 2 offsets"):
        AccessTrace().read(0, [0, 64], num_bytes)
    with pytest.raises(ValueError, match="line_bytes is 0"):
        simulate_caches(AccessTrace(), [64], line_bytes=0)


def test_wrong_capacities_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="ascending"):
        simulate_caches(AccessTrace(), [128, 64])
    with pytest.raises(ValueError, match="at least a line"):
        simulate_caches(AccessTrace(), [63])
    with pytest.raises(TypeError, match=r"capacities_bytes is 100\.5"):
        simulate_caches(AccessTrace(), [100.5])
    with pytest.raises(ValueError, match="num_bytes is None"):
        AccessTrace().read(0)
    monkeypatch.setattr(access_module, "_library", lambda: None)
    trace = AccessTrace()
    trace.read(0, 0, 128)
    assert simulate_caches(trace, [64])[0].loaded_bytes == 128


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((40, 16), (100, 1)), ((3, 5, 2), (700, 40, 3)), ((30, 30), (1, 17)), ((7, 9), (0, 64))],
    ids=["columns", "gaps of two sizes", "short rows", "repeated"],
)
def test_lines_between_the_elements_of_a_tensor_do_not_move(shape, strides):
    tensor = torch.as_strided(torch.zeros(5000), shape, strides, 3)
    at = sum(np.ix_(*(np.arange(n) * step for n, step in zip(shape, strides, strict=True))))
    lines = np.unique((tensor.data_ptr() + 4 * at) // 64)
    whole, streamed = AccessTrace(), AccessTrace()
    whole.read(tensor)
    streamed.stream([tensor], [other := torch.zeros(2000)])
    (found,) = simulate_caches(whole, [2**20])
    assert found.loaded_bytes == 64 * len(lines)
    (found,) = simulate_caches(streamed, [2**20], allocates=False)
    assert found.loaded_bytes == 64 * len(lines)
    assert streamed.written_bytes == other.nbytes and streamed.read_bytes == whole.read_bytes
