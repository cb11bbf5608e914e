"""Where an operation on a table runs, by where its operands are.

Another type of device plays the GPU: PyTorch's `meta`, on which everything can be computed but
values, so a result's device tells where an operation ran.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional

from penstock.errors import WholeTableError
from penstock.unified import UnifiedTensor, _devices, unify
from penstock.unified._devices import resolve_device
from penstock.unified.device import _registration
from penstock.unified.device import table as device_table
from penstock.unified.device._registration import MemoryUse
from penstock.unified.overrides import _rows, rules
from penstock.unified.overrides import gather as gather_module

META = torch.device("meta")


def x(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=META)


def index_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)


class Streams:
    """The streams of a device on which nothing takes time."""

    @staticmethod
    def current_stream(device: torch.device) -> torch.cpu.Stream:
        return torch.cpu.current_stream()

    stream = staticmethod(lambda stream: contextlib.nullcontext())


@pytest.fixture
def meta_is_the_gpu(monkeypatch):
    for module in (_devices, device_table, gather_module, rules, _rows):
        monkeypatch.setattr(module, "GPU", "meta")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(device_table, "_stream_module", lambda device: Streams)

    monkeypatch.setattr(MemoryUse, "register", lambda use, device: True)
    monkeypatch.setattr(
        _registration,
        "make_alias",
        lambda memory, device: torch.empty(memory.num_bytes, dtype=torch.uint8, device=device),
    )


ON_THE_GPU = {
    "u + x": lambda u: u + x(6),
    "x + u": lambda u: x(6) + u,
    "x * scalar - u": lambda u: x() * 2 - u,
    "u @ x": lambda u: u @ x(6, 2),
    "x @ u": lambda u: x(2, 50) @ u,
    "linear": lambda u: functional.linear(u, x(2, 6)),
    "torch.where": lambda u: torch.where(x(50, 6) > 0, u, 0.0),
    "take_along_dim": lambda u: torch.take_along_dim(u, index_of(3, 6), 0),
    "gather": lambda u: u.gather(0, index_of(3, 6)),
    "u[index, 2]": lambda u: u[index_of(4), 2],
    "index_select(1)": lambda u: u.index_select(1, index_of(4)),
    "cat": lambda u: torch.cat([u, x(1, 6)]),
    "max_norm": lambda u: functional.embedding_bag(index_of(3, 2), u),
    "x.copy_": lambda u: x(50, 6).copy_(u),
    "x.mul_": lambda u: x(50, 6).mul_(u),
    "addmm out": lambda u: torch.add(u, x(6), out=x(50, 6)),
}


@pytest.mark.parametrize("name", ON_THE_GPU)
def test_with_an_operand_on_the_gpu_it_runs_there(name, meta_is_the_gpu):
    found = ON_THE_GPU[name](unify(torch.randn(50, 6)))
    assert found.device == META and type(found) is torch.Tensor


ON_THE_CPU = {
    "u + y": lambda u: u + torch.ones(6),
    "u.sum()": lambda u: u.sum(),
    "u[3]": lambda u: u[3],
    "u[2:5]": lambda u: u[2:5],
    "u[..., 0]": lambda u: u[..., 0],
    "u.cpu()": lambda u: u.cpu(),
}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_without_one_it_runs_on_the_cpu(name, meta_is_the_gpu):
    content = torch.randn(50, 6)
    found = ON_THE_CPU[name](unify(content))
    assert torch.equal(found, ON_THE_CPU[name](content))


IN_PLACE = {
    "add_": lambda u: u.add_(x(6)),
    "scatter_": lambda u: u.scatter_(0, index_of(2, 6), x(2, 6)),
    "u[index] = number": lambda u: u.__setitem__(index_of(3), 2.0),
    "u[slice] = x": lambda u: u.__setitem__(slice(2, 4), x(2, 6)),
    "u[index, 1] = x": lambda u: u.__setitem__((index_of(3), 1), x(3)),
    "index_fill_": lambda u: u.index_fill_(0, index_of(3), 1.0),
    "index_add_(dim 1)": lambda u: u.index_add_(1, index_of(2), x(50, 2)),
    "copy_": lambda u: u.copy_(x(50, 6)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_write_by_the_gpu_changes_the_version_and_gives_the_table(name, meta_is_the_gpu):
    u = unify(torch.randn(50, 6))
    before = u._version
    result = IN_PLACE[name](u)
    assert result is None or result is u
    assert u._version > before


def test_reading_does_not_change_the_version(meta_is_the_gpu):
    u = unify(torch.randn(50, 6))
    before = u._version
    for read in ON_THE_GPU.values():
        read(u)
    assert u._version == before


def test_a_write_is_seen_by_autograd_and_by_other_tensors_over_the_table(meta_is_the_gpu):
    u, weight = unify(torch.randn(50, 6)), x(6).requires_grad_()
    loss = (u * weight).sum()
    u.index_add_(0, torch.tensor([1]), torch.ones(1, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    other = torch.Tensor._make_subclass(UnifiedTensor, u._table.rows)
    other._table = u._table.view_from(META, None)
    before = u._version
    assert other.addcmul_(u, x(6)) is other
    assert u._version > before


def test_a_gradient_as_large_as_the_table_is_refused(meta_is_the_gpu):
    u = unify(torch.randn(50, 6), requires_grad=True)
    with pytest.raises(WholeTableError, match=r"the gradient of \w+ on meta would copy the whole"):
        torch.mul(u, x(6))
    assert (u.detach() * x(6)).device == META
    with torch.no_grad():
        assert (u * x(6)).device == META


def test_where_cuda_refused_the_memory_it_says_what_to_do(meta_is_the_gpu, monkeypatch):
    monkeypatch.setattr(MemoryUse, "register", lambda use, device: False)
    with pytest.raises(WholeTableError, match=r"CUDA refused .* gather rows, or allow more locked"):
        torch.mul(unify(torch.randn(50, 6)), x(6))


def test_a_table_in_a_file_is_never_read_whole(meta_is_the_gpu, tmp_path):
    import numpy as np

    np.save(tmp_path / "x.npy", np.ones((5, 6)))
    with pytest.raises(WholeTableError, match="gather rows of it"):
        torch.mul(unify(tmp_path / "x.npy"), x(6))


def test_a_table_is_at_home_where_its_rows_go(meta_is_the_gpu):
    u = unify(torch.randn(50, 6))
    there = u._table.view_from(META, None)
    v = torch.Tensor._make_subclass(UnifiedTensor, there.rows)
    v._table = there
    assert v.output_device == META and v.device.type == "cpu"
    assert v.to("meta") is v and v.to(META, torch.float32) is v
    with pytest.raises(WholeTableError, match=r"unify\(u, device='meta'\)"):
        u.to("meta")
    with pytest.raises(WholeTableError, match=r"converting it to torch\.float64"):
        v.to("meta", torch.float64)


def test_properties_do_not_wait_for_the_gpu(meta_is_the_gpu, monkeypatch):
    u = unify(torch.randn(50, 6))
    waits = []
    monkeypatch.setattr(u._table.use, "synchronize", lambda **_: waits.append(1))
    assert (u.shape, len(u), u.dim(), u.size(0), u.dtype) == ((50, 6), 50, 2, 50, torch.float32)
    assert u.is_leaf and u.numel() == 300 and u.stride() == (6, 1) and u.is_contiguous()
    assert waits == []
    u.sum()
    assert waits == [1]


# -------------------------------------------------------------------------- devices


def test_a_device_is_found_or_refused(monkeypatch):
    if not torch.cuda.is_available():
        assert resolve_device(None) == torch.device("cpu")
        with pytest.raises(ValueError, match=r"device='cuda:1': PyTorch finds no CUDA device here"):
            resolve_device("cuda:1")
        with pytest.raises(ValueError, match=r"device='cuda'.*device=\"cpu\""):
            unify(torch.ones(2, 2), device="cuda")
    assert resolve_device("cpu") == resolve_device(torch.device("cpu", 0)) == torch.device("cpu")
    with pytest.raises(ValueError, match="expected the CPU or a CUDA device"):
        resolve_device("meta")
    with pytest.raises(ValueError, match="device='tpu9'"):
        resolve_device("tpu9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(None) == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device(1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="finds 2 CUDA devices"):
        resolve_device(2)


def test_a_forked_child_of_a_user_of_cuda_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_devices, "is_in_bad_fork", lambda: True)
    assert resolve_device(None) == torch.device("cpu")
    table = unify(torch.ones(3, 2))._table.view_from(torch.device("cuda", 0), None)
    with pytest.raises(RuntimeError, match=r"forked from one that uses CUDA.*spawn"):
        table.device_table(torch.device("cuda", 0))


def test_empty_and_unify_take_a_device():
    u = unify(torch.ones(3, 2), device="cpu")
    assert u.output_device == torch.device("cpu")
    assert unify(u, device="cpu")._table is u._table
