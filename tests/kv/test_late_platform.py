"""Pools on a device on which nothing runs before it is waited for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from simulated_cuda import SimulatedCuda

import late_platform
from pool_machine import PoolMachine, run_machine

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("one_thread")


class LateMachine(PoolMachine):
    """Tensors of the caller are computed late as well, and freed when the call returns."""

    cuda: SimulatedCuda
    num_pages = 8  # a block of each of six sequences passes at once

    def to_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0

    def from_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        self.cuda.synchronize()
        return tensor

    def launch(self) -> contextlib.AbstractContextManager[None]:
        return self.cuda.kernels()


def test_any_order_of_operations(
    store: Path, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
):
    copies = late_platform.install(simulated_cuda, monkeypatch)
    run_machine(LateMachine, num_examples=15, store=store, cuda=simulated_cuda)
    assert copies.num_launches > 0
