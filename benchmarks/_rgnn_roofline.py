"""The roofline of each kernel of a program: its time, its least bytes, its operations.

The bytes are those that no implementation can avoid: every value that is read counts once, however
many edges read it, and never with more rows than the loop has; indices are 4 bytes a row for each
map that is followed. The roofline's two numbers are measured in the same process: copying a large
tensor, and a large product of matrices in the precision that PyTorch is set to.

Needs a backend that can compute single kernels, as those do that run on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from _rgnn_arms import Layer, OurProgram
from penstock.rgnn import CompiledFunction, Graph
from penstock.rgnn._compiled_program import CompiledProgram
from penstock.rgnn.backends import Invocation, Results
from penstock.rgnn.ir import find_maps, find_source
from penstock.rgnn.lowering import Direction, Kernel, LoweredProgram, find_fused_outers
from penstock.rgnn.passes import name_seed
from penstock.rgnn.spaces import RowMap, Space

REPETITIONS = 9
INDEX_BYTES = 4
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
PRODUCT_ROWS = {"cpu": 2048, "cuda": 8192}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The measured limits of a device."""

    bytes_per_second: float
    operations_per_second: float

    def seconds(self, num_bytes: int, num_operations: int) -> float:
        """Return the least time for so much work."""
        return max(num_bytes / self.bytes_per_second, num_operations / self.operations_per_second)


def measured_roofline(device: str) -> Roofline:
    """Copy a tensor and multiply two matrices, each a few times; the best of them counts."""
    kind = torch.device(device).type
    values = torch.ones(COPIED_BYTES[kind] // 4, device=device)
    into = torch.empty_like(values)
    copying = min(_seconds(lambda: into.copy_(values), device))
    length = PRODUCT_ROWS[kind]
    left, out = torch.ones(length, length, device=device), torch.empty(length, length).to(device)
    multiplying = min(_seconds(lambda: torch.mm(left, left, out=out), device))
    return Roofline(
        bytes_per_second=2 * values.nbytes / copying,
        operations_per_second=2 * length**3 / multiplying,
    )


def kernel_facts(
    layer: Layer, program: OurProgram, backend: str, roofline: Roofline
) -> list[dict[str, Any]]:
    """Return time, least bytes, operations and fraction of the roofline of each kernel.

    Args:
        layer: The layer.
        program: Its program.
        backend: The backend that runs single kernels.
        roofline: Of the device.
    """
    graph, arguments, compiled = _training_program(program, backend)
    lowered = compiled.lowered
    explained = program.explain(training=True).kernels
    memory: dict[int, torch.Tensor] = {}
    found = []
    kernels = enumerate(lowered.schedule.kernels)
    for (number, kernel), facts in zip(kernels, explained, strict=True):
        values = frozenset(kernel.values)
        keep = tuple(sorted(values & lowered.schedule.materialised))
        direction = Direction(values, (kernel,), number, (), keep)

        def run(direction: Direction = direction) -> Results:
            return compiled.run_direction(Invocation(direction, graph, arguments, memory))

        _, made = run()
        seconds = statistics.median(_seconds(run, str(graph.device)))
        memory.update(made)
        num_bytes = _least_bytes(lowered, kernel, graph)
        num_operations = 2 * facts.multiplications or _elementwise_operations(
            lowered, kernel, graph
        )
        found.append(
            {
                "kernel": f"{facts.kind} over {facts.rows_of} rows",
                "backward": facts.is_backward,
                "seconds": float(f"{seconds:.4g}"),
                "least_bytes": num_bytes,
                "operations": num_operations,
                "roofline_fraction": round(
                    roofline.seconds(num_bytes, num_operations) / seconds, 4
                ),
            }
        )
    return found


def _training_program(
    program: OurProgram, backend: str
) -> tuple[Graph, dict[str, torch.Tensor], CompiledProgram]:
    """Return the program of a training step, and its arguments with the outputs' gradients."""
    found: list[tuple[Graph, dict[str, torch.Tensor], CompiledProgram]] = []

    def record(compiled: CompiledFunction, graph: Graph, *args: Any) -> torch.Tensor:
        traced, tensors = compiled._trace_call(graph, args, {})
        wrt = tuple(name for name in tensors if tensors[name].requires_grad)
        result = compiled(graph, *args)
        seeds = {name_seed(0): torch.ones_like(result)}
        optimized = compiled._compile_for(traced, graph, wrt).lowered.optimized
        found.append((graph, tensors | seeds, CompiledProgram(optimized, backend)))
        return result

    program.forward(record)
    return found[0]


def _least_bytes(lowered: LoweredProgram, kernel: Kernel, graph: Graph) -> int:
    program, counts = lowered.optimized.program, graph.counts
    fused, own = find_fused_outers(program), set(kernel.values)
    read: dict[int, int] = {}  # rows of each value that comes from memory
    followed: set[RowMap] = set()
    pending = list(own)
    while pending:
        for operand in program.nodes[pending.pop()].operands:
            value = find_source(program, operand)
            followed.update(find_maps(program, operand))
            if value in fused:
                pending.append(value)
            elif value not in own:
                rows = counts.rows(program.nodes[value].space)
                read[value] = min(rows, max(counts.rows(kernel.space), read.get(value, 0)))
    written = {
        at: counts.rows(program.nodes[at].space) for at in own & lowered.schedule.materialised
    }
    of_values = sum(
        rows * math.prod(program.nodes[value].shape) * 4
        for value, rows in [*read.items(), *written.items()]
    )
    return of_values + INDEX_BYTES * sum(
        counts.rows(row_map.rows) for row_map in followed if row_map.into is not Space.ONE
    )


def _elementwise_operations(lowered: LoweredProgram, kernel: Kernel, graph: Graph) -> int:
    """Return one operation for each element that a traversal computes or adds up."""
    rows = graph.counts.rows(kernel.space)
    return sum(
        rows * math.prod(lowered.optimized.program.nodes[value].shape) for value in kernel.values
    )


def _seconds(run: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of some runs, after a first one; on a GPU of its kernels alone."""
    run()
    if device != "cpu":
        return [_kernel_seconds(run) for _ in range(REPETITIONS)]
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def _kernel_seconds(run: Callable[[], object]) -> float:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
