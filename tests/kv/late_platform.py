"""The platform of CUDA devices on a simulated one, whose kernels run on the CPU, and late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from simulated_cuda import SimulatedCuda

from penstock.kv import _kernel, _pool
from penstock.kv._cuda import CudaPlatform


class LatePlatform(CudaPlatform):
    """A CUDA platform whose device is the CPU, behind the streams of `SimulatedCuda`."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__(torch.device("cpu"))
        self._cuda = cuda
        self._pinned: list[torch.Tensor] = []

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Wait for a tensor, and read it."""
        self._cuda.current_stream().synchronize()
        return tensor.numpy().copy()

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array from page-locked memory, late."""
        pinned = torch.from_numpy(array.copy())
        self._pinned.append(pinned)  # as PyTorch does until the copy has ended
        self._cuda.registered[pinned.data_ptr()] = max(1, pinned.nbytes)
        with self._cuda.kernels():
            return torch.empty_like(pinned).copy_(pinned, non_blocking=True)


class LateCopies:
    """`copy_launch` of copies that are made when the device reaches them."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self.num_launches = 0

    def __call__(self, table: torch.Tensor, num_bytes: int, alignment: int) -> Any:
        late = self._cuda.pool.unowned(table)
        self.num_launches += 1

        def run() -> None:
            destinations, sources = late.numpy()
            assert not ((destinations | sources) % alignment).any() and num_bytes % alignment == 0
            assert len(np.unique(destinations)) == len(destinations), "one writer of each place"
            _kernel.copy_pieces(destinations, sources, num_bytes)

        return lambda: self._cuda.current_stream().launch(run)


def make_attend(cuda: SimulatedCuda) -> Any:
    """`attend_records` of a GPU, computed on the CPU when the device reaches it."""

    def attend(query: Any, addresses: Any, counts: Any, **options: Any) -> Any:
        assert options.pop("is_aligned")
        shape, num_records = query.shape[:3], addresses.shape[2]
        with cuda.kernels():
            found = [
                torch.empty(*shape, options["value_dim"]),
                torch.empty(shape),
                torch.empty(*shape, num_records if options["with_block_lse"] else 0),
            ]
        results = [cuda.pool.unowned(each) for each in found]
        operands = [cuda.pool.unowned(each) for each in (query, addresses, counts)]
        for name in ("visible", "bias"):
            if options[name] is not None:
                options[name] = cuda.pool.unowned(options[name])

        def run() -> None:
            assert not (operands[1] % 16).any()
            computed = _kernel.attend_records(*operands, **options)
            for to, each in zip(results, computed, strict=True):
                if each is not None:
                    to.copy_(each)

        cuda.current_stream().launch(run)
        return found[0], found[1], found[2] if options["with_block_lse"] else None

    return attend


def install(cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Make pools on a simulated device, whatever device they are asked for."""
    from penstock.kv import triton
    from penstock.kv.triton import _copy

    read_now = torch.Tensor.cpu

    def read(tensor: torch.Tensor) -> torch.Tensor:
        cuda.current_stream().synchronize()
        return read_now(tensor)

    copies = LateCopies(cuda)
    monkeypatch.setattr(_pool, "make_platform", lambda _: LatePlatform(cuda))
    monkeypatch.setattr(_copy, "copy_launch", copies)
    monkeypatch.setattr(triton, "attend_records", make_attend(cuda))
    monkeypatch.setattr(torch.Tensor, "cpu", read)
    return copies
