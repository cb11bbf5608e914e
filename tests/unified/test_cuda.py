"""Tables that a GPU reads where they lie; needs a GPU."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import WholeTableError
from penstock.unified import HotRows, empty, unify
from penstock.unified.device import _registration
from penstock.unified.optim import SGD
from random_rows import DTYPES, noise, same_bits

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
WIDTHS = [1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 513, 602, 4096, 16384]


@pytest.fixture(params=["triton", "staged"])
def method(request, monkeypatch) -> str:
    """Both ways to a GPU: reading registered memory, and through buffers if CUDA refuses."""
    if request.param == "staged":
        monkeypatch.setattr(_registration, "try_pin", lambda *_: 1)  # refused
    return request.param


# --------------------------------------------------------------------------- reads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_copies_bits(width, dtype):
    content = noise(300, width, dtype=dtype)
    u = unify(content)
    index = torch.randint(0, 300, (1000,))
    for each in (index, index.cuda(), index.int().cuda()):
        found = u[each]
        assert found.device == CUDA and same_bits(found, content[index])
    assert u.report().method == "triton"


@pytest.mark.parametrize("width", [1, 16, 64, 601])
def test_large_gathers_of_small_and_misaligned_rows(width, method):
    content = noise(100_000, width, dtype=torch.int8)
    u, index = unify(content), torch.randint(0, 100_000, (500_000,))
    assert torch.equal(u[index.cuda()].cpu(), content[index])
    assert u.report().method == method


def test_a_table_beyond_what_32_bits_count(method):
    num_rows = (2**32 + 2**20) // 64
    u = empty((num_rows, 64), torch.uint8)
    index = torch.tensor([0, 1, num_rows // 2, num_rows - 1])
    rows = torch.randint(0, 256, (4, 64), dtype=torch.uint8)
    u[index] = rows
    assert torch.equal(u[index.cuda()].cpu(), rows)


READS = {
    "u[index]": lambda u, i: u[i],
    "u[negative]": lambda u, i: u[i - 50],
    "u[2d]": lambda u, i: u[i.view(4, 5)],
    "u[int32]": lambda u, i: u[i.int()],
    "index_select": lambda u, i: torch.index_select(u, 0, i),
    "embedding": lambda u, i: functional.embedding(i, u),
    "u[empty]": lambda u, i: u[i[:0]],
    "u[mask]": lambda u, i: u[
        torch.zeros(50, dtype=torch.bool, device=i.device).index_fill(0, i, True)
    ],
    "arithmetic": lambda u, i: u * torch.ones(6, device=i.device) + 1,
    "matmul": lambda u, i: u @ torch.ones(6, 2, device=i.device),
    "where": lambda u, i: torch.where(torch.ones(6, device=i.device) > 0, u, 0),
    "take_along_dim": lambda u, i: torch.take_along_dim(u, i[:18].view(3, 6), 0),
}


@pytest.mark.parametrize("name", READS)
def test_reads_as_of_a_tensor_on_the_gpu(name):
    content, index = torch.randn(50, 6), torch.randint(0, 50, (20,), device="cuda")
    found = READS[name](unify(content), index)
    assert found.device == CUDA and type(found) is torch.Tensor
    torch.testing.assert_close(found, READS[name](content.cuda(), index))


def test_where_rows_go():
    content, index = torch.randn(50, 6), torch.tensor([3, 1])
    u, v = unify(content), unify(content, device="cpu")
    assert (u.output_device, v.output_device) == (CUDA, torch.device("cpu"))
    assert u.device.type == "cpu" and u[index].device == CUDA and v[index].device.type == "cpu"
    assert v[index.cuda()].device == CUDA
    out = torch.empty(2, 6)
    assert u.gather_rows(index, out=out) is out and torch.equal(out, content[index])
    out = torch.empty(2, 12, device="cuda")[:, ::2]
    assert u.gather_rows(index, out=out) is out and torch.equal(out.cpu(), content[index])
    with pytest.raises(ValueError, match="out: expected a tensor on cuda:0"):
        u.gather_rows(index.cuda(), out=torch.empty(2, 6))
    assert u.to("cuda") is u and u.cuda() is u
    with pytest.raises(WholeTableError):
        v.cuda()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_wrong_indices_are_named(where, method):
    u = unify(torch.randn(50, 6))
    index = torch.tensor([[0, 1], [50, -1]], device=where)
    with pytest.raises(IndexError, match=r"index\[1\]\[0\] is 50, but the table has 50 rows"):
        u.gather_rows(index)
    assert torch.equal(u[torch.tensor([49], device=where)].cpu(), u.cpu()[49:])  # CUDA is well


def test_a_wrong_index_of_an_asynchronous_gather_is_told_later():
    u = unify(torch.ones(50, 6))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    pending = u.gather_rows_async(torch.tensor([3, 50], device="cuda"), stream=stream)
    rows = pending.wait()
    torch.cuda.synchronize()
    assert rows[0].eq(1).all() and not rows[1].any()
    with pytest.raises(IndexError, match=r"index\[1\] is 50"):
        u.report()
    u.report()


# -------------------------------------------------------------------------- writes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 129, 4096])
def test_put_keeps_the_last_of_several(width, dtype, method):
    content, rows = noise(60, width, dtype=dtype), noise(200, width, dtype=dtype)
    index = torch.randint(-60, 60, (200,))
    u = unify(content)
    u[index.cuda()] = rows.cuda()
    for at, row in enumerate(index.tolist()):
        content[row] = rows[at]
    assert same_bits(u.cpu(), content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.complex64])
@pytest.mark.parametrize("alpha", [1, -3])
def test_add_is_in_the_order_of_the_index_and_so_the_same_each_time(dtype, alpha, method):
    content, rows = torch.randn(64, 257).mul(100).to(dtype), torch.randn(5000, 257).to(dtype)
    index = torch.randint(0, 64, (5000,))
    found = []
    for _ in range(3):
        u = unify(content)
        u.index_add_(0, index.cuda(), rows.cuda(), alpha=alpha)
        found.append(u.cpu().clone())
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])
    expected = content.clone()
    for at, row in enumerate(index.tolist()):
        expected[row] += rows[at] * alpha
    # The CPU, which adds staged rows, may round a product and its sum at once.
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if method == "staged" and dtype.itemsize == 4 else {}
    torch.testing.assert_close(found[0], expected, **tolerance)
    if alpha == 1:
        assert same_bits(found[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_added_in_float32_and_rounded_once(dtype):
    content, rows = torch.randn(8, 33).to(dtype), torch.randn(100, 33).to(dtype)
    index = torch.randint(0, 8, (100,))
    u, expected = unify(content), content.float()
    u.index_add_(0, index.cuda(), rows.cuda())
    for at, row in enumerate(index.tolist()):
        expected[row] += rows[at].float()
    assert same_bits(u.cpu(), expected.to(dtype))


WRITES = {
    "u[index] = number": lambda t, i, x: t.__setitem__(i, 2.0),
    "u[index, 1] = x": lambda t, i, x: t.__setitem__((i, 1), x[:, 1]),
    "scatter_": lambda t, i, x: t.scatter_(0, i[:, None].expand(-1, 6), x),
    "index_copy_": lambda t, i, x: t.index_copy_(0, i, x),
    "mul_": lambda t, i, x: t.mul_(x[0]),
    "add_ whole": lambda t, i, x: t.add_(torch.ones(50, 6, device=x.device)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_table_and_the_cpu_sees_them(name):
    content, index, x = torch.randn(50, 6), torch.tensor([4, 0, 9]), torch.randn(3, 6)
    u, expected = unify(content), content.cuda()
    version = u._version
    WRITES[name](u, index.cuda(), x.cuda())
    WRITES[name](expected, index.cuda(), x.cuda())
    assert torch.equal(u.cpu(), expected.cpu())
    assert u._version > version


def test_nothing_is_written_if_an_index_is_wrong(method):
    u = unify(torch.zeros(50, 6))
    for write in (u.index_add_, u.index_copy_):
        with pytest.raises(IndexError, match=r"index\[1\] is 50"):
            write(0, torch.tensor([0, 50], device="cuda"), torch.ones(2, 6, device="cuda"))
    assert not u.cpu().any()


def test_the_cpu_writes_after_a_gather_in_flight_has_read():
    u = unify(torch.zeros(1 << 20, 64))
    index = torch.randint(0, 1 << 20, (1 << 20,), device="cuda")
    for step in range(5):
        rows = u.gather_rows_async(index)
        u[torch.arange(1 << 20)] = torch.full((1 << 20, 64), step + 1.0)
        assert rows.wait().eq(step).all()


def test_a_gather_on_another_stream_comes_after_a_write():
    u, index = unify(torch.zeros(1 << 18, 64)), torch.arange(1 << 18)
    on_gpu = index.cuda()
    torch.cuda.synchronize()
    for step in range(1, 6):
        u.index_copy_(0, on_gpu, torch.full((1 << 18, 64), float(step), device="cuda"))
        assert u.gather_rows_async(index).wait().eq(step).all()


# ----------------------------------------------------------- registration and its end


def test_memory_that_is_registered_already_is_refused_and_staged(caplog):
    content = torch.randn(5000, 16)
    u = unify(content)
    runtime = torch.cuda.cudart()
    torch.cuda.init()
    u.share_memory_()
    address = u._table.memory.address
    assert int(runtime.cudaHostRegister(address, 4096, 1)) == 0
    try:
        with caplog.at_level("INFO", logger="penstock"):
            index = torch.randint(0, 5000, (100,), device="cuda")
            assert torch.equal(u[index].cpu(), content[index.cpu()])
        assert "refused to register" in caplog.text and u.report().method == "staged"
        torch.zeros(3, device="cuda").add_(1)  # no error of before comes up
        torch.cuda.synchronize()
        with pytest.raises(WholeTableError, match="CUDA refused"):
            torch.mul(u, torch.ones(16, device="cuda"))
        u.index_add_(0, index[:1], torch.ones(1, 16, device="cuda"))
        content[int(index[0])] += 1
        assert torch.equal(u.cpu(), content)
    finally:
        assert int(runtime.cudaHostUnregister(address)) == 0


@pytest.fixture
def unpinned(monkeypatch) -> list[int]:
    """Addresses of memory that was unregistered."""
    addresses = []
    unpin = _registration.unpin
    monkeypatch.setattr(
        _registration, "unpin", lambda address: (addresses.append(address), unpin(address))
    )
    return addresses


def test_memory_ends_while_kernels_are_under_way_on_two_streams(unpinned):
    for _ in range(20):
        unpinned.clear()
        u = unify(torch.ones(1 << 18, 64))
        address = u._table.memory.address
        index = torch.randint(0, 1 << 18, (1 << 18,), device="cuda")
        pending = [u.gather_rows_async(index, stream=torch.cuda.Stream()) for _ in range(2)]
        assert address not in unpinned
        del u
        rows = [each.wait() for each in pending]
        del pending
        gc.collect()
        assert address in unpinned
        for each in rows:
            assert each.eq(1).all()


def test_a_view_of_an_alias_keeps_the_memory(unpinned):
    u = unify(torch.arange(600.0).view(100, 6))
    address = u._table.memory.address
    view = u._table.device_table(CUDA).alias()[50:]
    assert view.data_ptr() == address + 50 * 24  # no copy
    del u
    gc.collect()
    assert address not in unpinned
    assert torch.equal(view.cpu(), torch.arange(300.0, 600.0).view(50, 6))
    del view
    gc.collect()
    assert address in unpinned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64])
def test_an_alias_of_any_dtype_is_no_copy(dtype):
    content = noise(40, 5, dtype=dtype)
    u = unify(content)
    alias = u._table.device_table(CUDA).alias()
    assert alias.dtype == dtype and alias.data_ptr() == u.data_ptr() and alias.device == CUDA
    assert same_bits(alias, content)


def test_the_end_of_the_interpreter_is_quiet():
    code = (
        "import torch, penstock.unified as p\n"
        "u = p.unify(torch.ones(1 << 18, 64))\n"
        "index = torch.randint(0, 1 << 18, (1 << 20,), device='cuda')\n"
        "pending = [u.gather_rows_async(index) for _ in range(10)]\n"
        "alias = u * torch.ones(64, device='cuda')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def gather_in_child(table, expected, results):
    index = torch.tensor([1, 3, 3], device="cuda")
    ok = torch.equal(table[index].cpu(), expected[[1, 3, 3]])
    table.index_add_(0, index, torch.ones(3, 4, device="cuda"))
    torch.cuda.synchronize()
    results.put((ok, table.report().method, os.getpid()))


def test_a_spawned_process_registers_the_memory_itself():
    content = torch.randn(8, 4)
    table = unify(content, cache="4KiB")  # each process has its own
    table[torch.tensor([0])]  # registered here already
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=gather_in_child, args=(table, content, results))
    child.start()
    assert results.get(timeout=120)[:2] == (True, "triton")
    child.join(60)
    assert child.exitcode == 0
    content[1] += 1
    content[3] += 2
    assert torch.equal(table.cpu(), content)


def test_a_forked_child_is_told_what_to_do():
    table = unify(torch.ones(4, 2))
    table[torch.tensor([0])]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            table[torch.tensor([0])]
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked from one that uses CUDA" in os.read(reader, 10_000)
    os.close(reader)
    os.close(writer)
    assert table[torch.tensor([0])].eq(1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_reads_the_same_memory():
    content = torch.randn(50, 6)
    u, index = unify(content, device=0), torch.tensor([3, 1])
    for device in ("cuda:0", "cuda:1"):
        assert torch.equal(u[index.to(device)].cpu(), content[index])
        assert (u * torch.ones(6, device=device)).device == torch.device(device)
        assert u._table.device_table(torch.device(device)).alias().data_ptr() == u.data_ptr()


# --------------------------------------------------------------- streams and threads


def test_asynchronous_gathers_are_the_rows(method):
    content = torch.randn(10_000, 65)
    u = unify(content)
    batches = [torch.randint(0, 10_000, (3000,)) for _ in range(20)]
    for where in ("cpu", "cuda"):
        pending = [u.gather_rows_async(index.to(where)) for index in batches]
        for index, each in zip(batches, pending, strict=True):
            assert torch.equal(each.wait().cpu(), content[index])
            assert each.done()
    with pytest.raises(IndexError, match=r"index\[0\] is 10000"):
        u.gather_rows_async(torch.tensor([10_000])).wait()


def test_waiting_does_not_block_the_host():
    u = unify(torch.ones(1000, 16))
    stream = torch.cuda.Stream()
    # Compiling a kernel takes longer, and loading one waits for the device.
    _ = u.gather_rows_async(torch.arange(1000), stream=stream).wait() * 2
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    pending = u.gather_rows_async(torch.arange(1000), stream=stream)
    rows = pending.wait() * 2
    assert not pending.done()  # the host is here, the rows are not
    assert rows.eq(2).all()


def test_rows_outlive_the_stream_they_came_on():
    u = unify(torch.ones(100_000, 64))
    index = torch.arange(100_000)
    for _ in range(20):
        total = u.gather_rows_async(index).wait().sum()  # rows are freed at once
        junk = u.gather_rows_async(index).wait() * 0  # and their memory is used again
        assert float(total) == 6_400_000 and not junk.any()


def test_threads_gather_from_one_cached_table():
    content = torch.randn(2000, 32)
    u, failed = unify(content, cache="64KiB"), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                index = torch.randint(0, 2000, (200,), generator=generator)
                if not torch.equal(u[index].cpu(), content[index]):
                    failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_graph_that_was_captured_gathers_again():
    content, index = torch.randn(500, 16), torch.randint(0, 500, (64,), device="cuda")
    u = unify(content)
    u[index]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = u[index]
    del u
    gc.collect()
    index.fill_(7)
    graph.replay()
    assert torch.equal(rows.cpu(), content[[7] * 64])


# ------------------------------------------------------------------------ hot rows


@pytest.mark.parametrize("scores", [False, True])
def test_hot_rows_are_read_from_the_gpu_and_stay_right(scores, method):
    content = torch.randn(5000, 33)
    weights = torch.arange(1, 5001).reciprocal()
    hot = HotRows("64KiB", scores=weights if scores else None)
    u = unify(content, cache=hot)
    for step in range(40):
        index = weights.multinomial(500, replacement=True)
        found = u[index.cuda() if step % 2 else index]
        assert torch.equal(found.cpu(), u.cpu()[index])
        if step % 10 == 3:
            u.index_add_(0, index.cuda(), torch.ones(500, 33, device="cuda"))
        if step % 10 == 6:
            u[index] = torch.randn(500, 33)
        if step % 10 == 9:
            u.mul_(torch.full((), 0.5, device="cpu" if method == "staged" else "cuda"))
    report = u.report()
    assert report.method == method and report.cache_bytes == 65536
    assert report.num_cache_misses > 0 and report.num_cache_hits > 0.2 * report.num_cache_misses
    with pytest.raises(IndexError, match=r"index\[2\] is 5000"):
        u.gather_rows(torch.tensor([1, 2, 5000, 3], device="cuda"))
    index = weights.multinomial(500, replacement=True)
    assert torch.equal(u.gather_rows_async(index.cuda()).wait().cpu(), u.cpu()[index])


def test_the_cache_keeps_its_budget():
    u = unify(torch.ones(1000, 256), cache="256KiB")
    index = torch.arange(1000)
    u[index]
    torch.cuda.synchronize()
    cache = u._table.device_table(CUDA)._cache
    assert sum(each.numel() * each.element_size() for each in cache.tensors) <= (256 << 10) + 16


@pytest.mark.parametrize("cache", [None, "64KiB"])
def test_a_table_in_a_file_yields_rows_on_the_gpu(tmp_path, cache):
    content = np.random.default_rng(0).random((3000, 40), dtype=np.float32)
    np.save(tmp_path / "x.npy", content)
    u = unify(tmp_path / "x.npy", cache=cache)
    for where in ("cpu", "cuda"):
        for _ in range(5):
            index = torch.randint(0, 3000, (700,)).pow(2) // 3000
            found = u[index.to(where)]
            assert found.device == CUDA
            assert np.array_equal(found.cpu().numpy(), content[index.numpy()])
    pending = u.gather_rows_async(index.cuda())
    assert np.array_equal(pending.wait().cpu().numpy(), content[index.numpy()])
    assert u.report().method == "staged"
    assert (u.report().num_cache_hits > 0) == (cache is not None)


# ----------------------------------------------------------------------- gradients


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_gradients_are_sparse_on_the_tables_side(where):
    content = torch.randn(50, 6)
    u = unify(content, requires_grad=True)
    dense = content.cuda().requires_grad_()
    index, weight = torch.tensor([3, -2, 3, 49]), torch.randn(4, 6, device="cuda")
    for table, i in ((u, index.to(where)), (dense, index.cuda())):
        ((table[i] * weight).sum() + functional.embedding(i.abs(), table).square().sum()).backward()
    assert u.grad.layout == torch.sparse_coo and u.grad.device.type == "cpu"
    torch.testing.assert_close(u.grad.to_dense(), dense.grad.cpu())
    assert not u.detach().requires_grad
    with pytest.raises(WholeTableError, match="the gradient of"):
        torch.mul(u, weight[0])


def test_gradients_through_asynchronous_rows_and_of_second_order():
    u = unify(torch.randn(50, 6, dtype=torch.float64), requires_grad=True)
    index = torch.tensor([1, 2, 1], device="cuda")
    rows = u.gather_rows_async(index).wait()
    (first,) = torch.autograd.grad(rows.pow(3).sum(), rows, create_graph=True)
    first.sum().backward()
    expected = torch.zeros(50, 6, dtype=torch.float64)
    expected.index_add_(0, index.cpu(), 6 * u.detach().cpu()[index.cpu()])
    torch.testing.assert_close(u.grad.to_dense(), expected)


def test_training_is_that_of_a_table_on_the_gpu():
    torch.manual_seed(0)
    content, head = torch.randn(200, 16), nn.Linear(16, 4).cuda()
    heads = [head, copy.deepcopy(head)]
    tables = [unify(content, requires_grad=True), content.cuda().requires_grad_()]
    optimizers = [SGD([tables[0]], lr=0.1), torch.optim.SGD([tables[1]], lr=0.1)]
    for _ in range(10):
        index = torch.randint(0, 200, (64,), device="cuda")
        for table, layer, optimizer in zip(tables, heads, optimizers, strict=True):
            optimizer.zero_grad()
            layer(table[index]).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].detach().cpu(), tables[1].detach().cpu())


def test_a_model_with_a_table_moves_to_the_gpu_without_it():
    model = nn.Module()
    model.table = nn.Parameter(unify(torch.randn(50, 6)))
    model.head = nn.Linear(6, 1)
    model.to("cuda")
    assert model.table.device.type == "cpu" and model.head.weight.device == CUDA
    assert model.head(model.table[torch.tensor([1, 2], device="cuda")]).shape == (2, 1)


def test_a_compiled_function_gathers():
    content, index = torch.randn(50, 6), torch.tensor([3, 1, 3], device="cuda")
    compiled = torch.compile(lambda table, i: table[i].sin() * 2)
    found = compiled(unify(content), index)
    torch.testing.assert_close(found, content.cuda()[index].sin() * 2)


def test_operators_are_what_they_say():
    from penstock.unified.device import _rows as device_rows

    u = unify(torch.randn(90, 6))
    u[torch.tensor([0])]
    index = torch.tensor([3, 1, 3], device="cuda")
    out = torch.zeros(3, 6, device="cuda")
    first = torch.full((), torch.iinfo(torch.int64).max, device="cuda")
    tests = ("test_schema", "test_faketensor")
    table = u._table.device_table(CUDA).alias()  # of which the schema's test makes copies
    arguments = (table, index, out, None, first, False, True, 0)
    torch.library.opcheck(device_rows.copy_rows, arguments, test_utils=tests)
