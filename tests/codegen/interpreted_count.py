"""What `test_count.py` runs in a process of its own, where Triton interprets its kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.codegen import ByteCount, count_bytes
from penstock.errors import PenstockError
from triton_tests import is_triton_since

assert os.environ.get("TRITON_INTERPRET") == "1", "test_count.py runs this"


@triton.jit
def product(
    a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply a (M, K) by b (K, N), tile by tile."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        in_a = (m < M)[:, None] & (k < K)[None, :]
        in_b = (k < K)[:, None] & (n < N)[None, :]
        left = tl.load(a + m[:, None] * K + k[None, :], mask=in_a, other=0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=in_b, other=0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def scatter(values, places, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Add values to places."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < N, other=0)
    tl.atomic_add(out + tl.load(places + at, mask=at < N, other=0), value, mask=at < N)


@triton.jit
def lock(flags):
    """Set a flag that is not set, and load another without a mask."""
    tl.atomic_cas(flags + tl.program_id(0), 0, 1)
    tl.store(flags + 8, tl.load(flags + 9))


@triton.jit
def copy_block(source, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a vector through block pointers."""
    first = tl.program_id(0) * BLOCK
    read = tl.make_block_ptr(source, (N,), (1,), (first,), (BLOCK,), (0,))
    written = tl.make_block_ptr(out, (N,), (1,), (first,), (BLOCK,), (0,))
    tl.store(written, tl.load(read, boundary_check=(0,)), boundary_check=(0,))


@triton.jit
def copy_tile(source, out, BM: tl.constexpr, BN: tl.constexpr):
    """Copy a matrix through descriptors."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    out.store([m, n], source.load([m, n]))


@triton.jit
def fill(flags, N: tl.constexpr, BLOCK: tl.constexpr):
    """Set bools; with each lane's condition of its own."""
    at = tl.arange(0, BLOCK)
    tl.store(flags + at, at % 2 == 0, mask=(at < N) & (at % 3 != 0))


def ceil_div(length: int, block: int) -> int:
    return -(-length // block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(32, 32, 32), (33, 50, 70), (1, 1, 1), (16, 47, 5)])
def test_a_tiled_product_reads_each_operand_once_per_tile_of_the_other(shape, dtype):
    (m, n, k), (bm, bn, bk) = shape, (16, 32, 16)
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.empty(m, n)
    grid = (ceil_div(m, bm), ceil_div(n, bn))
    count = count_bytes(lambda: product[grid](a, b, out, m, n, k, bm, bn, bk))
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    loaded = (m * k * grid[1] + k * n * grid[0]) * dtype.itemsize
    assert count == ByteCount(
        loaded_bytes=loaded, stored_bytes=4 * m * n, atomic_bytes=0, num_launches=1
    )
    assert count.to_dict()["loaded_bytes"] == loaded


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_atomics_count_their_unmasked_lanes(length):
    values, places, out = torch.ones(length), torch.arange(length) % 7, torch.zeros(7)
    count = count_bytes(lambda: scatter[(ceil_div(length, 64),)](values, places, out, length, 64))
    assert out.sum() == length
    assert (count.loaded_bytes, count.stored_bytes) == ((4 + 8) * length, 0)
    assert count.atomic_bytes == 4 * length


def test_accesses_without_a_mask_and_compare_and_swap():
    flags = torch.zeros(10, dtype=torch.int32)
    count = count_bytes(lambda: lock[(3,)](flags))
    assert flags.tolist() == [1, 1, 1] + [0] * 7
    assert (count.loaded_bytes, count.stored_bytes, count.atomic_bytes) == (12, 12, 12)


@pytest.mark.skipif(is_triton_since(3, 9), reason="Triton 3.9 has no block pointers any more")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")  # by Triton 3.8
@pytest.mark.parametrize("length", [64, 50, 1])
def test_block_pointers(length):
    source, out = torch.randn(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    count = count_bytes(lambda: copy_block[(ceil_div(length, 16),)](source, out, length, 16))
    assert torch.equal(out, source)
    assert (count.loaded_bytes, count.stored_bytes) == (8 * length, 8 * length)


def test_descriptors():
    source, out = torch.randn(13, 20), torch.zeros(13, 20)
    ends = [TensorDescriptor.from_tensor(each, [8, 16]) for each in (source, out)]
    count = count_bytes(lambda: copy_tile[(2, 2)](*ends, 8, 16))
    assert torch.equal(out, source)
    assert (count.loaded_bytes, count.stored_bytes) == (4 * 13 * 20, 4 * 13 * 20)


def test_bools_take_a_byte_and_masked_lanes_none():
    flags = torch.zeros(20, dtype=torch.bool)
    count = count_bytes(lambda: fill[(1,)](flags, 20, 32))
    assert count.stored_bytes == sum(at % 3 != 0 for at in range(20))


def test_launches_add_up_and_an_inner_count_belongs_to_the_outer_one_too():
    flags, inner = torch.zeros(10, dtype=torch.int32), []

    def twice() -> None:
        lock[(1,)](flags)
        inner.append(count_bytes(lambda: lock[(2,)](flags)))

    outer = count_bytes(twice)
    assert (outer.num_launches, inner[0].num_launches) == (2, 1)
    assert (outer.atomic_bytes, inner[0].atomic_bytes) == (12, 8)
    assert count_bytes(lambda: None).num_launches == 0


def test_nothing_stays_wrapped():
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    before = [getattr(interpreter.InterpreterBuilder, name) for name in names]
    with pytest.raises(ZeroDivisionError):
        count_bytes(lambda: 1 // 0)
    assert [getattr(interpreter.InterpreterBuilder, name) for name in names] == before


def test_a_compiled_kernel_is_refused():
    from triton.runtime.jit import JITFunction

    kernel: Any = lock
    compiled = JITFunction(kernel.fn)
    with pytest.raises(PenstockError, match=r"a kernel is compiled.*TRITON_INTERPRET=1 before"):
        count_bytes(lambda: compiled[(1,)](torch.zeros(10, dtype=torch.int32)))


def test_another_interpreter_is_refused_by_the_names_it_lacks(monkeypatch):
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_masked_load", lambda self, mask, ptrs: None
    )
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_descriptor_store")
    with pytest.raises(
        PenstockError,
        match=r"no create_masked_load\(ptrs, mask\), no create_descriptor_store: count_bytes knows",
    ):
        count_bytes(lambda: None)
