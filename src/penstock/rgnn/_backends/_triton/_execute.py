"""Runs kernels of a schedule one after another, and lets go of what no later one reads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from triton import knobs

from penstock.codegen import load_module
from penstock.errors import PenstockError
from penstock.rgnn import _interpreter
from penstock.rgnn._backends import _torch
from penstock.rgnn._backends._triton import _source
from penstock.rgnn._backends._triton._body import Inexpressible
from penstock.rgnn._backends._triton._launch import Call, Launch, compile_together, read_of
from penstock.rgnn._backends._triton._products import typed_product, weight_gradient
from penstock.rgnn._backends._triton._source import Source
from penstock.rgnn._backends._triton._traverse import traverse
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan
from penstock.rgnn._schedule import Kernel, KernelKind, fused_outers, source

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
    on_device = contextlib.nullcontext()
    if graph.device.type == "cuda":  # Triton launches on the current device
        on_device = torch.cuda.device(graph.device)
    call = (plan, graph, values, given, arguments, outputs, keep)
    with on_device, torch.autocast(graph.device.type, enabled=False):
        if graph.device.type == "cuda":
            _compile_once(*call)
        return execute_with(Launch.__call__, *call)


def _compile_once(
    plan: Plan,
    graph: Graph,
    values: frozenset[int],
    given: Mapping[int, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    *rest: Any,
) -> None:
    """Compile what a call launches, if it is the first of the plan in its dtype.

    Other graphs may launch other kernels, of groups of other sizes; those are compiled one by one.
    """
    dtypes = frozenset(tensor.dtype for tensor in (*arguments.values(), *given.values()))
    key = ("triton, compiled", values, dtypes)
    if key not in plan.compiled:
        call = (plan, graph, values, given, arguments, *rest)
        compile_together(lambda take: execute_with(take, *call))
        plan.compiled[key] = True


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What is made of a plan once."""

    source: Source
    module: ModuleType
    reads: tuple[frozenset[int], ...]
    """For each kernel, the values that it reads from memory."""


def _prepare(plan: Plan) -> _Prepared:
    known = plan.compiled.get("triton")
    if isinstance(known, _Prepared):
        return known
    written = _source.write(plan)
    for number, reason in written.reasons.items():
        _logger.info("kernel %d of the plan runs in torch: %s", number, reason)
    kernels = plan.schedule.kernels
    prepared = _Prepared(
        written,
        load_module("rgnn_traversals", written.text),
        tuple(_reads(plan, kernel) for kernel in kernels),
    )
    plan.compiled["triton"] = prepared
    return prepared


def _reads(plan: Plan, kernel: Kernel) -> frozenset[int]:
    program = plan.program
    fused = fused_outers(program)
    found: set[int] = set()
    for value in kernel.values:
        for operand in program.nodes[value].operands:
            operands = program.nodes[operand].operands if operand in fused else (operand,)
            found.update(source(program, each) for each in operands)
    found = {value for value in found if program.nodes[value].op != "inverse_count"}
    return frozenset(found.difference(kernel.values))


def execute_with(
    run: Callable[[Launch], None],
    plan: Plan,
    graph: Graph,
    values: frozenset[int],
    given: Mapping[int, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    outputs: Sequence[int],
    keep: Collection[int],
) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    """As `execute`; `run` takes each launch, so that another may look at them instead."""
    program, prepared = plan.program, _prepare(plan)
    tensors = (*arguments.values(), *given.values())
    dtype = next((tensor.dtype for tensor in tensors), torch.get_default_dtype())
    on = Call(program, graph, dtype, run, dict(given))
    for name, position in program.inputs().items():
        if name in arguments:
            space = program.nodes[position].space
            rows = _interpreter.enter(graph, space, arguments[name].detach())
            on.memory[position] = rows.contiguous()
    numbers = [
        number
        for number, kernel in enumerate(plan.schedule.kernels)
        if not values.isdisjoint(kernel.values)
    ]
    wanted = {*keep, *(source(program, output) for output in outputs)}
    last = {value: number for number in numbers for value in prepared.reads[number]}
    for number in numbers:
        _run_kernel(on, plan, prepared, number)
        for value in prepared.reads[number]:
            if last[value] == number and value not in wanted:
                del on.memory[value]
    kept = {position: on.memory[position] for position in keep}
    return _leave(on, outputs, [*tensors, *kept.values()]), kept


def _run_kernel(on: Call, plan: Plan, prepared: _Prepared, number: int) -> None:
    kernel = plan.schedule.kernels[number]
    node = on.program.nodes[kernel.values[0]]
    try:
        if kernel.kind is KernelKind.GEMM:
            on.memory[kernel.values[0]] = typed_product(on, node)
        elif kernel.kind is KernelKind.WEIGHT_GRADIENT:
            on.memory[kernel.values[0]] = weight_gradient(on, node)
        elif number in prepared.source.traversals:
            traverse(on, prepared.source.traversals[number], prepared.module, kernel)
        else:
            _run_in_torch(on, plan, kernel)
    except Inexpressible as reason:
        _logger.info("kernel %d of the plan runs in torch: %s", number, reason)
        _run_in_torch(on, plan, kernel)


def _run_in_torch(on: Call, plan: Plan, kernel: Kernel) -> None:
    stored = [value for value in kernel.values if value in plan.schedule.materialised]
    values = frozenset(kernel.values)
    dtype = _interpreter.wide_dtype(on.dtype)
    wide = {at: rows.to(dtype) for at, rows in on.memory.items()}
    _, found = _torch.execute(plan, on.graph, values, wide, {}, (), stored)
    on.memory.update({at: rows.to(on.dtype) for at, rows in found.items()})


def _leave(
    on: Call, outputs: Sequence[int], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Outputs as the user has them; none shares memory with another or with `others`."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    found = []
    for output in outputs:
        node = on.program.nodes[output]
        read, maps = read_of(on.program, output)
        rows = on.rows(read)
        for row_map in reversed(maps):
            rows = rows.index_select(0, on.graph.index(row_map))
        rows = rows.view(len(rows), *node.shape)
        rows = _interpreter.leave(on.graph, node.space, rows)
        if rows.untyped_storage().data_ptr() in taken:
            rows = rows.clone()
        taken.add(rows.untyped_storage().data_ptr())
        found.append(rows)
    return tuple(found)
