"""Seconds that operators take: as measured on this machine, else by a roofline over a profile.

Roofline: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. With the attainable rates of
arithmetic P and of memory traffic B, an operator takes

    seconds = start + max(flops / P, bytes / B).

Operators are alike if target, shapes, strides, dtypes and numbers are; a step of a deep model has
a hundred different ones, not ten thousand. Operands hold numbers between 0 and 1, indices are 0.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.compat.autograd import below_autograd
from penstock.compat.random_numbers import keep_random_state
from penstock.graph.capturing.schemas import COLLECTIVES
from penstock.graph.encoding import (
    EMPTY,
    GET_RNG_STATE,
    OWN_TARGETS,
    SCALAR,
    SET_RNG_STATE,
    decode_arguments,
    dtype_from_name,
    flat_results,
    resolve,
    view_memory,
)
from penstock.graph.executable import is_on_host
from penstock.graph.step_graph import Operator, Phase, StepGraph, TensorView, views_in
from penstock.memory import MachineProfile, machine

_logger = logging.getLogger(__name__)

_SCALAR_BYTES = 64  # a number that is wrapped in a tensor is no workspace
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_FREE = (EMPTY, SCALAR, GET_RNG_STATE, SET_RNG_STATE)  # they run on the host, or are only a place


def measure(
    graph: StepGraph,
    *,
    device: torch.device | str | None = None,
    num_runs: int = 5,
    workspace: bool = False,
) -> StepGraph:
    """Run every distinct operator of a step, and return the graph with the seconds that it took.

    Example:
        >>> graph = StepGraph(storages=(), storage_of_value=(), operators=())
        >>> measure(graph).operators
        ()

    Args:
        graph: The step. Its largest operator has to fit into the device's memory.
        device: Where to run; by default the graph's device.
        num_runs: Runs of each operator after one to warm up; their median counts.
        workspace: Also measure the bytes that each operator allocates beyond its results, and raise
            `workspace_bytes` to that. On the CPU these are allocations from torch's allocator.

    Returns:
        The same graph with `seconds`; collectives have none, as other ranks need not measure now.
    """
    where = torch.device(graph.device if device is None else device)
    known: dict[Any, tuple[float, int]] = {}
    operators = []
    for operator in graph.operators:
        if operator.target in OWN_TARGETS or operator.target in COLLECTIVES:
            operators.append(operator)
            continue
        key = _cost_key(operator)
        if key not in known:
            with keep_random_state(where):
                known[key] = _measure_or_estimate(graph, operator, where, num_runs, workspace)
        seconds, workspace_bytes = known[key]
        operators.append(
            dataclasses.replace(
                operator,
                seconds=seconds,
                workspace_bytes=max(operator.workspace_bytes, workspace_bytes),
            )
        )
    return dataclasses.replace(graph, operators=tuple(operators))


def _cost_key(operator: Operator) -> Any:
    """Return a key that is the same for operators that take the same time."""
    order: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, TensorView):
            return ("view", order.setdefault(value.value, len(order)), *value[1:])
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if isinstance(value, Mapping):
            return tuple(
                (key, repr(item) if key != "scalar" else "") for key, item in value.items()
            )
        return value

    kwargs = tuple((name, plain(value)) for name, value in operator.kwargs.items())
    return operator.target, operator.phase is Phase.FORWARD, plain(operator.args), kwargs


def _measure_or_estimate(
    graph: StepGraph, operator: Operator, device: torch.device, num_runs: int, workspace: bool
) -> tuple[float, int]:
    """Measure an operator; one that refuses made-up operands counts as a copy of them."""
    for integer in (0, 1):  # indices from zero; pivots from one
        try:
            return _measure(graph, operator, device, num_runs, workspace, integer)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:
            refusal = error
    _logger.info("%s counts as a copy of its operands: %s", operator.target, refusal)
    num_bytes = operator.bytes_read + operator.bytes_written
    operands = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return statistics.median(_seconds(operands.clone, device) for _ in range(num_runs)), 0


def _measure(
    graph: StepGraph,
    operator: Operator,
    device: torch.device,
    num_runs: int,
    workspace: bool,
    integer: int,
) -> tuple[float, int]:
    memory: dict[int, torch.Tensor] = {}

    def tensor(view: TensorView) -> torch.Tensor:
        if view.value not in memory:
            where = torch.device("cpu") if is_on_host(graph, view) else device
            memory[view.value] = _make_operand(graph, view, where, integer)
        storage = memory[view.value].untyped_storage()
        return view_memory(storage, view, storage.device)

    args, kwargs = decode_arguments(operator, device, tensor, lambda _: 0.5)
    call = functools.partial(resolve(operator.target), *args, **kwargs)
    with below_autograd(), torch.set_grad_enabled(operator.phase is Phase.FORWARD):
        call()  # sets up a library's handles, which does not count
        allocated = _allocated_bytes(call, device) if workspace else 0
        seconds = [_seconds(call, device) for _ in range(num_runs)]
    return statistics.median(seconds), allocated


def _make_operand(
    graph: StepGraph, view: TensorView, device: torch.device, integer: int
) -> torch.Tensor:
    dtype = dtype_from_name(view.dtype)
    num_elements = max(view.end, graph.num_bytes(view.value) // dtype.itemsize)
    if dtype.is_floating_point:
        return torch.rand(num_elements, dtype=torch.float32, device=device).to(dtype)
    return torch.full((num_elements,), integer, dtype=dtype, device=device)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _allocated_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of an operator's allocations, without its results."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        peak = torch.cuda.max_memory_allocated() - before
        kept = torch.cuda.memory_allocated() - before
        del results
        return max(0, peak - kept)
    # torch 2.11 warns at every start of a profile that does not accumulate, this first cycle too.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        results = [each for each in flat_results(call()) if isinstance(each, torch.Tensor)]
    current = peak = 0
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()  # pyright: ignore
            peak = max(peak, current)
    kept = current if results else 0
    allocated = max(0, peak - max(0, kept))
    return allocated if allocated > _SCALAR_BYTES else 0


def operator_seconds(graph: StepGraph, machine_profile: MachineProfile | str) -> tuple[float, ...]:
    """Return the seconds that each operator of a step takes on a machine.

    Example:
        >>> operator_seconds(StepGraph(storages=(), storage_of_value=(), operators=()), "h200")
        ()

    Args:
        graph: The step; operators with measured `seconds` keep them.
        machine_profile: A profile, with `compute` unless every operator was measured or is free; or
            the name of a built-in machine.

    Returns:
        Seconds, in the order of `graph.operators`.

    Raises:
        ValueError: An operator was not measured, and the profile does not say how fast the machine
            computes.
    """
    profile = machine(machine_profile) if isinstance(machine_profile, str) else machine_profile
    return tuple(_estimate_seconds(operator, profile) for operator in graph.operators)


def _estimate_seconds(operator: Operator, profile: MachineProfile) -> float:
    """Return the measured time, or that of a roofline."""
    if operator.seconds is not None:
        return operator.seconds
    if operator.target in _FREE:
        return 0.0
    if profile.compute is None:
        raise ValueError(
            f"operator {operator.name!r} was not measured and the profile of {profile.name!r} does "
            "not say how fast it computes; measure it anew with penstock.probe(refresh=True), or "
            "use a built-in machine"
        )
    num_bytes = operator.bytes_read + operator.bytes_written
    return profile.compute.seconds(operator.flops, num_bytes, _dtype(operator))


def _dtype(operator: Operator) -> str:
    """Name the narrowest float among the operands: products are as fast as their factors allow."""
    found = {view.dtype for view in views_in(operator.args)}
    found |= {view.dtype for view in operator.outputs if view is not None}
    return max(found & set(_FLOATS), key=_FLOATS.index, default="float32")
