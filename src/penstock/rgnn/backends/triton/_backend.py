"""The Triton back end: kernels of a direction one after another, values freed at their last use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch
from triton import knobs

from penstock._lazy import cached_property
from penstock.codegen import load_module, use_device
from penstock.errors import PenstockError
from penstock.rgnn.backends._invocation import (
    Backend,
    Invocation,
    Results,
    enter_arguments,
    leave_results,
)
from penstock.rgnn.backends._torch import Evaluation
from penstock.rgnn.backends.triton._body import Inexpressible
from penstock.rgnn.backends.triton._launch import (
    KernelLaunch,
    LaunchContext,
    compile_together,
    run_traversal,
    run_typed_product,
    run_weight_gradient,
)
from penstock.rgnn.backends.triton._source import TritonSource, write_source
from penstock.rgnn.interpreter import wide_dtype
from penstock.rgnn.ir import find_source
from penstock.rgnn.lowering import (
    Direction,
    Kernel,
    KernelKind,
    LoweredProgram,
    find_reads,
    lower,
)

_logger = logging.getLogger(__name__)
_PRODUCTS = {KernelKind.GEMM: run_typed_product, KernelKind.WEIGHT_GRADIENT: run_weight_gradient}


class TritonBackend(Backend):
    """Programs in Triton kernels."""

    lower = staticmethod(lower)
    has_half_precision = True

    def __init__(self, lowered: LoweredProgram) -> None:
        super().__init__(lowered)
        self._compiled: set[tuple[Direction, frozenset[torch.dtype]]] = set()

    def __call__(self, invocation: Invocation) -> Results:
        """Compute the values of a direction.

        Raises:
            PenstockError: The graph is not on a GPU, and Triton's interpreter is not on.
        """
        device = invocation.graph.device
        if device.type == "cpu" and not knobs.runtime.interpret:
            raise PenstockError(
                "backend 'triton' runs on GPUs, and the graph is on the CPU: move the graph and "
                "the tensors with .to('cuda'), or compile with backend='auto'; for tests, set "
                "TRITON_INTERPRET=1 before Triton is imported"
            )
        with use_device(device), torch.autocast(device.type, enabled=False):
            if device.type == "cuda":
                self.compile_once(invocation)
            return self.run(invocation, KernelLaunch.__call__)

    def compile_once(self, invocation: Invocation) -> None:
        """Compile the kernels of a run, if it is the direction's first in its dtypes.

        Other graphs may launch other kernels, of groups of other sizes; those are compiled one by
        one.
        """
        tensors = (*invocation.arguments.values(), *invocation.given.values())
        key = (invocation.direction, frozenset(tensor.dtype for tensor in tensors))
        if key not in self._compiled:
            compile_together(lambda launch: self.run(invocation, launch))
            self._compiled.add(key)

    def run(self, invocation: Invocation, launch: Callable[[KernelLaunch], None]) -> Results:
        """Go through the kernels of a direction; `launch` runs each launch, or records it only."""
        program, direction = self._program, invocation.direction
        memory = dict(invocation.given)
        for position, rows in enter_arguments(program, invocation).items():
            memory[position] = rows.contiguous()
        context = LaunchContext(program, invocation.graph, invocation.dtype, launch, memory)
        kept_until_end = {
            *direction.keep,
            *(find_source(program, out) for out in direction.outputs),
        }
        reads, first = self._module[2], direction.first_kernel
        numbers = range(first, first + len(direction.kernels))
        last = {value: number for number in numbers for value in reads[number]}
        for number in numbers:
            self._run_kernel(context, number)
            for value in reads[number]:
                if last[value] == number and value not in kept_until_end:
                    del memory[value]
        return leave_results(program, invocation, memory)

    @cached_property
    def _module(self) -> tuple[TritonSource, ModuleType, tuple[frozenset[int], ...]]:
        """The traversals as Triton kernels, and for each kernel what it reads from memory."""
        written = write_source(self._lowered)
        for number, reason in written.reasons.items():
            _logger.info("kernel %d of the program runs in torch: %s", number, reason)
        functions = load_module("rgnn_traversals", written.text)
        nodes, reads = self._program.nodes, find_reads(self._program)
        leaves = {at for at, node in enumerate(nodes) if node.op == "inverse_count"}
        of_kernels = []
        for kernel in self._lowered.schedule.kernels:
            read = frozenset().union(*(reads[value] for value in kernel.values))
            of_kernels.append(read - leaves.union(kernel.values))
        return written, functions, tuple(of_kernels)

    def _run_kernel(self, context: LaunchContext, number: int) -> None:
        kernel = self._lowered.schedule.kernels[number]
        value, (source, functions, _) = kernel.values[0], self._module
        node = context.program.nodes[value]
        try:
            if kernel.kind in _PRODUCTS:
                context.memory[value] = _PRODUCTS[kernel.kind](context, node)
            elif number in source.traversals:
                run_traversal(context, source.traversals[number], functions, kernel)
            else:
                self._run_in_torch(context, kernel)
        except Inexpressible as reason:
            _logger.info("kernel %d of the program runs in torch: %s", number, reason)
            self._run_in_torch(context, kernel)

    def _run_in_torch(self, context: LaunchContext, kernel: Kernel) -> None:
        materialised = self._lowered.schedule.materialised
        stored = tuple(value for value in kernel.values if value in materialised)
        dtype = wide_dtype(context.dtype)
        wide = {at: rows.to(dtype) for at, rows in context.memory.items()}
        direction = Direction(frozenset(kernel.values), (kernel,), 0, (), stored)
        invocation = Invocation(direction, context.graph, {}, wide)
        _, found = Evaluation(context.program, invocation).run()
        context.memory.update({at: rows.to(context.dtype) for at, rows in found.items()})
