"""Rows through two buffers: all of them, whatever the buffers' size."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.unified.device.table import Staging

CPU = torch.device("cpu")


@pytest.mark.parametrize("buffer_bytes", [1, 64, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_rows_arrive_in_parts_that_fit_a_buffer(buffer_bytes, dtype):
    table = torch.randn(50, 3, 2).to(dtype)
    index = torch.randint(0, 50, (33,))
    parts, buffers = [], []

    def gather(part, out):
        assert out.is_contiguous() and out.shape == (len(part), 3, 2)
        parts.append(len(part))
        buffers.append(out.data_ptr())
        out.copy_(table[part])

    out = torch.empty(33, 3, 2, dtype=dtype)
    staging = Staging(CPU, buffer_bytes=buffer_bytes)
    for _ in range(2):
        staging.read_rows(gather, index, out.zero_())
        assert torch.equal(out, table[index])
    row_bytes = 6 * dtype.itemsize
    assert all(one != next_one for one, next_one in itertools.pairwise(buffers))
    assert max(parts) == min(33, max(1, buffer_bytes // row_bytes))


def test_buffers_grow_for_a_row_that_is_longer_than_one():
    staging, small, large = Staging(CPU, buffer_bytes=8), torch.randn(4, 2), torch.randn(4, 500)
    for table in (small, large, small):
        out = torch.empty_like(table)
        staging.read_rows(
            lambda part, rows, table=table: rows.copy_(table[part]), torch.arange(4), out
        )
        assert torch.equal(out, table)


def test_no_bytes_still_check_the_index():
    def gather(index, out):
        raise IndexError("index[0] is 7")

    with pytest.raises(IndexError, match="is 7"):
        Staging(CPU).read_rows(gather, torch.tensor([7]), torch.empty(1, 0))


def test_an_error_in_the_middle_leaves_the_buffers_usable():
    staging, table = Staging(CPU, buffer_bytes=16), torch.randn(9, 2)

    def fail(index, out):
        raise OSError("disk")

    out = torch.empty(9, 2)
    with pytest.raises(OSError, match="disk"):
        staging.read_rows(fail, torch.arange(9), out)
    staging.read_rows(lambda part, rows: rows.copy_(table[part]), torch.arange(9), out)
    assert torch.equal(out, table)
