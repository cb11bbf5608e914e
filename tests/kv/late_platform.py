"""The platform of CUDA devices on a simulated one, whose kernels run on the CPU, and late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.kv import _device, _kernel, _pool
from penstock.kv._cuda import CudaPlatform
from penstock.kv._platform import CpuPlatform
from simulated_cuda import SimulatedCuda


class LatePlatform(CudaPlatform):
    """A CUDA platform whose device is the CPU, behind the streams of `SimulatedCuda`.

    With `has_early_side` transfers run as early as their waits allow, and all else as late.
    """

    def __init__(self, cuda: SimulatedCuda, *, has_early_side: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._cuda, self._has_early_side = cuda, has_early_side
        self._pinned: list[torch.Tensor] = []

    def _launch_copy(self, stream: Any, *pieces: Any) -> None:
        super()._launch_copy(stream, *pieces)
        if self._has_early_side and stream is self._side:
            stream.synchronize()

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


def check_link_reads(
    cuda: SimulatedCuda,
    query: torch.Tensor,
    addresses: torch.Tensor,
    counts: torch.Tensor,
    value_dim: int,
) -> None:
    """Assert that the kernel reads no record of host memory twice."""
    from penstock.kv.triton import most_rows

    read = addresses[counts > 0].tolist()
    ranges = list(cuda.registered.items())
    in_host = [a for a in read if any(first <= a < first + n for first, n in ranges)]
    assert len(in_host) == len(set(in_host)), "sequences share a record"
    num_rows = query.shape[1] // addresses.shape[1] * query.shape[2]
    if num_rows > most_rows(query.dtype, query.shape[3], value_dim):
        assert not in_host, "several programs read a record"


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
            check_link_reads(cuda, *operands, options["value_dim"])
            computed = _kernel.attend_records(*operands, **options)
            for to, each in zip(results, computed, strict=True):
                if each is not None:
                    to.copy_(each)

        cuda.current_stream().launch(run)
        return found[0], found[1], found[2] if options["with_block_lse"] else None

    return attend


def install(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, *, has_early_side: bool = False
) -> LateCopies:
    """Put pools that are asked for "cuda" on a simulated device."""
    from penstock.kv import triton

    read_now = torch.Tensor.cpu

    def read(tensor: torch.Tensor) -> torch.Tensor:
        cuda.current_stream().synchronize()
        return read_now(tensor)

    for name in ("_BUFFER_BYTES", "_CHUNK_BYTES"):
        monkeypatch.setattr(_device, name, 8192)  # which are taken again soon
    copies = LateCopies(cuda)

    def make(name: str) -> CpuPlatform | LatePlatform:
        return CpuPlatform() if name == "cpu" else LatePlatform(cuda, has_early_side=has_early_side)

    monkeypatch.setattr(_pool, "make_platform", make)
    monkeypatch.setattr(triton, "copy_launch", copies)
    monkeypatch.setattr(triton, "attend_records", make_attend(cuda))
    monkeypatch.setattr(torch.Tensor, "cpu", read)
    return copies
