"""Launches of Triton kernels, and the values that all launches of a run share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime._async_compile import FutureKernel

from penstock.rgnn.backends._invocation import read_rows
from penstock.rgnn.backends.triton import _kernels
from penstock.rgnn.backends.triton._index import power_of_two
from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import Program


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __call__(self) -> None:
        """Launch the kernel, unless there is nothing to do."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](*self.arguments, **self.constants, **self._options())

    def compile(self) -> None:
        """Compile its kernel, or have it compiled where `compile_together` waits for it."""
        if 0 in self.grid:
            return
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants, **self._options())

    def _options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def compile_together(walk: Callable[[Callable[[KernelLaunch], None]], object]) -> None:
    """Compile the kernels of a call at the same time, where each launch would wait for its own.

    Triton releases Python's lock in its passes and in LLVM, and the assembler is a process. What
    does not compile here is compiled again by its launch, which raises what is wrong with it: until
    3.12 Python itself now and then fails to parse in several threads at a time, this one included.
    """
    is_known = hasattr(os, "sched_getaffinity")
    num_threads = len(os.sched_getaffinity(0)) if is_known else os.cpu_count()
    kernels: dict[int, Any] = {}  # by identity: a kernel's hash parses its source

    def compile_unless_parsing_fails(launch: KernelLaunch) -> None:
        kernels[id(launch.kernel)] = launch.kernel
        with contextlib.suppress(SystemError):
            launch.compile()

    with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        walk(compile_unless_parsing_fails)
    # Triton 3.8 keeps a failure as it keeps a kernel, and would raise it again without compiling.
    for cache, *_ in (
        found for kernel in kernels.values() for found in kernel.device_caches.values()
    ):
        for key, made in tuple(cache.items()):
            if isinstance(made, FutureKernel):
                cache.pop(key, None)


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """A run of a direction: all that the launches of its kernels share.

    Attributes:
        program: The program.
        graph: The graph.
        dtype: The dtype of all values.
        run: Takes the launches.
        memory: Rows of values by position.
    """

    program: Program
    graph: Graph
    dtype: torch.dtype
    run: Callable[[KernelLaunch], None]
    memory: dict[int, torch.Tensor]

    def rows(self, position: int) -> torch.Tensor:
        """Return the rows of an input, of the graph's inverse counts, or of a value in memory."""
        return read_rows(self.program, self.graph, self.memory, position, self.dtype)


def add_pieces(
    context: LaunchContext,
    partial: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor | None,
    first_pieces: torch.Tensor,
) -> None:
    """Add pieces up, in their order, into rows of `out`: all of them, or those of `targets`."""
    arguments = (partial, out, out if targets is None else targets, first_pieces)
    constants = {"HAS_TARGETS": targets is not None, "SUM": sum_type(out.dtype)}
    join_pieces(context, _kernels.add_pieces, arguments, math.prod(out.shape[1:]), constants)


def join_pieces(
    context: LaunchContext,
    kernel: Any,
    arguments: tuple[torch.Tensor, ...],
    length: int,
    constants: Mapping[str, Any],
) -> None:
    """Launch a kernel that joins pieces of rows of a length; the last argument is their begins."""
    block = min(128, power_of_two(length))
    blocks = {"LENGTH": length, "BLOCK_PIECES": 16, "BLOCK_LENGTH": block}
    grid = (len(arguments[-1]) - 1, ceil_div(length, block))
    context.run(KernelLaunch(kernel, grid, arguments, {**blocks, **constants}))


def ceil_div(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return (length + block - 1) // block


def sum_type(dtype: torch.dtype) -> Any:
    """Return the dtype that numbers of `dtype` are added up in, as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32
