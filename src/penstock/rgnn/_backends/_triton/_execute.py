"""Runs kernels of a schedule one after another, and lets go of what no later one reads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

import torch
from triton import knobs

from penstock.codegen import load_module
from penstock.errors import PenstockError
from penstock.rgnn import _interpreter
from penstock.rgnn._backends import _torch
from penstock.rgnn._backends._triton import _launch, _source
from penstock.rgnn._backends._triton._body import Inexpressible
from penstock.rgnn._backends._triton._launch import Launch, Memory, Run, source_of
from penstock.rgnn._backends._triton._source import Source
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan
from penstock.rgnn._rows import Space
from penstock.rgnn._schedule import Kernel, KernelKind, fused_outers

_logger = logging.getLogger(__name__)


def execute(
    plan: Plan,
    graph: Graph,
    values: frozenset[int],
    given: Mapping[int, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    outputs: Sequence[int],
    keep: Collection[int],
) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    """Compute some values of a plan; see `_run.Execute`.

    Raises:
        PenstockError: The graph is not on a GPU, and Triton's interpreter is not on.
    """
    if graph.device.type == "cpu" and not knobs.runtime.interpret:
        raise PenstockError(
            "backend 'triton' runs on GPUs, and the graph is on the CPU: move the graph and the "
            "tensors with .to('cuda'), or compile with backend='auto'; for tests, set "
            "TRITON_INTERPRET=1 before Triton is imported"
        )
    execution = Execution(plan, graph, Launch.__call__)
    on_device = contextlib.nullcontext()
    if graph.device.type == "cuda":  # Triton launches on the current device
        on_device = torch.cuda.device(graph.device)
    with on_device, torch.autocast(graph.device.type, enabled=False):
        return execution.run(values, given, arguments, outputs, keep)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What is made of a plan once."""

    source: Source
    module: ModuleType
    reads: tuple[frozenset[int], ...]
    """For each kernel, the values that it reads from memory."""
    views: frozenset[int]
    """Kernels that store nothing but other shapes of what is in memory."""


_prepared: dict[int, tuple[weakref.ref[Plan], _Prepared]] = {}


def _prepare(plan: Plan) -> _Prepared:
    # By identity: to hash a plan is to hash every node of it.
    known = _prepared.get(id(plan))
    if known is not None and known[0]() is plan:
        return known[1]
    source = _source.write(plan)
    for number, reason in source.reasons.items():
        _logger.info("kernel %d of the plan runs in torch: %s", number, reason)
    kernels = plan.schedule.kernels
    prepared = _Prepared(
        source,
        load_module("rgnn_traversals", source.text),
        tuple(_reads(plan, kernel) for kernel in kernels),
        frozenset(at for at, kernel in enumerate(kernels) if _is_view(plan, kernel)),
    )
    identity = id(plan)
    _prepared[identity] = (weakref.ref(plan, lambda _: _prepared.pop(identity, None)), prepared)
    return prepared


def _reads(plan: Plan, kernel: Kernel) -> frozenset[int]:
    program = plan.program
    fused = fused_outers(program)
    found: set[int] = set()
    for value in kernel.values:
        for operand in program.nodes[value].operands:
            operands = program.nodes[operand].operands if operand in fused else (operand,)
            found.update(source_of(program, each)[0] for each in operands)
    return frozenset(found.difference(kernel.values))


def _is_view(plan: Plan, kernel: Kernel) -> bool:
    nodes = plan.program.nodes
    return kernel.kind is KernelKind.TRAVERSAL and all(
        nodes[value].op == "reshape"
        and nodes[nodes[value].operands[0]].op != "gather"
        and nodes[value].operands[0] not in kernel.values
        for value in kernel.values
    )


class Execution:
    """Runs kernels of a plan on a graph.

    Args:
        plan: The plan.
        graph: The graph.
        launch: Takes each launch; usually it launches it.
    """

    def __init__(self, plan: Plan, graph: Graph, launch: Run) -> None:
        self._plan = plan
        self._program = plan.program
        self._graph = graph
        self._launch = launch
        self._prepared = _prepare(plan)
        self._memory: Memory = {}

    def run(
        self,
        values: frozenset[int],
        given: Mapping[int, torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        outputs: Sequence[int],
        keep: Collection[int],
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Compute values; see `_run.Execute`."""
        program, memory = self._program, self._memory
        tensors = (*arguments.values(), *given.values())
        self._dtype = next((tensor.dtype for tensor in tensors), torch.get_default_dtype())
        memory.update(given)
        for name, position in program.inputs().items():
            if name in arguments:
                space = program.nodes[position].space
                argument = arguments[name].detach()
                memory[position] = _interpreter.enter(self._graph, space, argument).contiguous()
        numbers = [
            number
            for number, kernel in enumerate(self._plan.schedule.kernels)
            if not values.isdisjoint(kernel.values)
        ]
        wanted = {*keep, *(source_of(program, output)[0] for output in outputs)}
        last = {value: number for number in numbers for value in self._prepared.reads[number]}
        for number in numbers:
            self._run_kernel(number)
            for value in self._prepared.reads[number]:
                if last[value] == number and value not in wanted:
                    del memory[value]
        kept = {position: memory[position] for position in keep}
        return self._leave(outputs, [*arguments.values(), *given.values(), *kept.values()]), kept

    def _run_kernel(self, number: int) -> None:
        kernel = self._plan.schedule.kernels[number]
        program, memory = self._program, self._memory
        rest = (self._graph, memory, self._launch)
        node = program.nodes[kernel.values[0]]
        if number in self._prepared.views:
            for value in kernel.values:
                (operand,) = program.nodes[value].operands
                rows = memory[operand]
                memory[value] = rows.view(len(rows), *program.nodes[value].shape)
            return
        try:
            if kernel.kind is KernelKind.GEMM:
                memory[kernel.values[0]] = _launch.typed_product(program, node, *rest)
            elif kernel.kind is KernelKind.WEIGHT_GRADIENT:
                memory[kernel.values[0]] = _launch.weight_gradient(program, node, *rest)
            elif number in self._prepared.source.traversals:
                written = self._prepared.source.traversals[number]
                module = self._prepared.module
                _launch.traversal(written, module, program, kernel, *rest, self._dtype)
            else:
                self._run_in_torch(kernel)
        except Inexpressible:
            self._run_in_torch(kernel)

    def _run_in_torch(self, kernel: Kernel) -> None:
        stored = [value for value in kernel.values if value in self._plan.schedule.materialised]
        _, found = _torch.execute(
            self._plan, self._graph, frozenset(kernel.values), self._memory, {}, (), stored
        )
        self._memory.update(found)

    def _leave(
        self, outputs: Sequence[int], others: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Outputs as the user has them; none shares memory with another or with `others`."""
        taken = {tensor.untyped_storage().data_ptr() for tensor in others}
        found = []
        for output in outputs:
            source, maps = source_of(self._program, output)
            rows = self._memory[source]
            for row_map in reversed(maps):
                if row_map.into is Space.ONE:
                    num_rows = self._graph.counts.rows(row_map.rows)
                    rows = rows.expand(num_rows, *rows.shape[1:]).contiguous()
                else:
                    rows = rows.index_select(0, self._graph.index(row_map))
            rows = _interpreter.leave(self._graph, self._program.nodes[output].space, rows)
            if rows.untyped_storage().data_ptr() in taken:
                rows = rows.clone()
            taken.add(rows.untyped_storage().data_ptr())
            found.append(rows)
        return tuple(found)
