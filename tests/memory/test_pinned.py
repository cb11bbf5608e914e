"""Pinned memory: a refusal of CUDA is an error or a number, and leaves no error behind."""

import logging
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PenstockError
from penstock.memory import pinned
from simulated_cuda import SimulatedCuda


@pytest.fixture
def cuda(monkeypatch) -> SimulatedCuda:
    return SimulatedCuda().install(monkeypatch)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What the CUDA runtime is asked for."""
    asked: list[str] = []
    library = SimpleNamespace(cudaGetLastError=lambda: asked.append("last error"))
    monkeypatch.setattr(pinned, "_runtime_library", lambda: library)
    return asked


def test_memory_is_pinned_until_it_is_unpinned(cuda, asked):
    pinned.pin(4096, 100, remedy="use less")
    assert cuda.calls == [("register", 4096, 100, 1)] and cuda.registered == {4096: 100}
    assert pinned.unpin(4096) == 0 and not cuda.registered
    assert asked == []


def test_a_refusal_names_the_remedy(cuda, asked):
    cuda.code = 2
    with pytest.raises(PenstockError, match=r"4\.00 KiB .*error 2\): use less, or .*ulimit -l"):
        pinned.pin(4096, 4096, remedy="use less")
    assert asked == ["last error"]


def test_a_refusal_can_be_a_number(cuda, asked):
    cuda.code = 2
    assert pinned.try_pin(4096, 4096, torch.device("cuda", 0)) == 2
    assert asked == ["last error"]  # not a kernel: its launch would be the call that fails


def test_without_the_runtimes_library_a_kernel_asks(cuda, monkeypatch):
    monkeypatch.setattr(pinned, "_runtime_library", lambda: None)
    cuda.code = 2
    assert pinned.try_pin(4096, 4096, torch.device("cpu")) == 2


def test_an_error_of_unpinning_is_logged(cuda, monkeypatch, caplog):
    monkeypatch.setattr(cuda, "cudaHostUnregister", lambda address: 5)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert pinned.unpin(4096) == 5
    assert "cudaHostUnregister failed with CUDA error 5" in caplog.text


@pytest.mark.gpu
def test_a_gpu_forgets_that_it_refused():
    memory = torch.zeros(8192, dtype=torch.uint8)
    pinned.pin(memory.data_ptr(), 8192, remedy="")
    assert memory.is_pinned()
    assert pinned.try_pin(memory.data_ptr(), 8192) != 0  # it is already
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    assert pinned.unpin(memory.data_ptr()) == 0
