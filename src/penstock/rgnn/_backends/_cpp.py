"""The backend of generated C++: one library for each direction of a plan, one call for each run.

The kernels of the schedule become functions of a shared library, built once and kept in the user's
cache. What a call needs of a graph is built once for the graph; what is left for a call is to fill a
struct with pointers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.codegen import load_library
from penstock.rgnn import _interpreter
from penstock.rgnn._backends import _torch
from penstock.rgnn._backends._cpp_fields import Field
from penstock.rgnn._backends._cpp_graph import GraphArrays, arrays_of
from penstock.rgnn._backends._cpp_memory import Lifetime, pack
from penstock.rgnn._backends._cpp_source import ENTRY, Source, write_source
from penstock.rgnn._graph import Graph
from penstock.rgnn._ir import LEAVES, Program
from penstock.rgnn._plan import Plan
from penstock.rgnn._rows import Space
from penstock.rgnn._schedule import source

DTYPES = {torch.float32: "float", torch.float64: "double"}
"""The dtypes that are computed in C++; others are left to torch."""

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
_INDEX_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t"}


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
        BuildError: There is no compiler, or it fails; the message says what to do.
        ValueError: The graph is not on the CPU.
    """
    if graph.device.type != "cpu":
        raise ValueError(
            f'backend is "cpp", which computes on the CPU, and the graph is on {graph.device}; '
            f'use backend="auto", or graph.to("cpu")'
        )
    tensors = [*arguments.values(), *given.values()]
    dtype = tensors[0].dtype if tensors else torch.get_default_dtype()
    if dtype not in DTYPES:
        return _torch.execute(plan, graph, values, given, arguments, outputs, keep)
    arrays = arrays_of(graph)
    is_backward = values is not plan.forward and values == plan.backward
    key = ("cpp", is_backward, dtype, arrays.index_dtype)
    compiled = plan.compiled.get(key)
    if compiled is None:
        compiled = _Compiled(plan, is_backward, dtype, arrays.index_dtype)
        plan.compiled[key] = compiled
    assert isinstance(compiled, _Compiled)
    return compiled.run(arrays, given, arguments, outputs, keep)


class _Compiled:
    """One direction of a plan as a loaded library."""

    def __init__(
        self, plan: Plan, is_backward: bool, dtype: torch.dtype, index_dtype: torch.dtype
    ) -> None:
        written = write_source(
            plan, is_backward=is_backward, scalar=DTYPES[dtype], index=_INDEX_TYPES[index_dtype]
        )
        library = load_library("rgnn", written.text, flags=_FLAGS)
        self._entry = getattr(library, ENTRY)
        self._entry.argtypes, self._entry.restype = [ctypes.c_void_p], None
        self._program, self._dtype, self._fields = plan.program, dtype, written.fields
        self._frame = ctypes.c_int64 * len(written.fields)
        split = plan.schedule.num_forward
        kernels = plan.schedule.kernels
        self._kernels = kernels[split:] if is_backward else kernels[:split]
        self._written = [
            v for k in self._kernels for v in k.values if v in plan.schedule.materialised
        ]
        self._lives = _lifetimes(plan.program, [k.values for k in self._kernels])

    def run(
        self,
        arrays: GraphArrays,
        given: Mapping[int, torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        outputs: Sequence[int],
        keep: Collection[int],
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Compute everything; see `_run.Execute`."""
        graph, program = arrays.graph, self._program
        rows = {at: tensor.contiguous() for at, tensor in given.items()}
        for name, position in program.inputs().items():
            if name in arguments:
                rows[position] = _entered(graph, program.nodes[position].space, arguments[name])
        seen = {*keep, *(source(program, output) for output in outputs)}
        for value in seen.intersection(self._written):
            node = program.nodes[value]
            rows[value] = torch.empty(
                graph.counts.rows(node.space), *node.shape, dtype=self._dtype
            )
        offsets, arena_bytes = self._layout(arrays, frozenset(seen))
        arena = torch.empty(arena_bytes, dtype=torch.uint8)
        base = arena.data_ptr()
        places = {at: tensor.data_ptr() for at, tensor in rows.items()}
        places |= {at: base + offset for at, offset in offsets.items()}
        frame = self._frame(*(self._number(field, arrays, rows, places) for field in self._fields))
        self._entry(frame)
        return _results(program, graph, rows, outputs, keep, self._dtype), {
            at: rows[at] for at in keep
        }

    def _layout(self, arrays: GraphArrays, seen: frozenset[int]) -> tuple[dict[int, int], int]:
        """Offsets in the arena of what only this program sees; parts have negative names."""
        counts, width = arrays.graph.counts, self._dtype.itemsize
        lifetimes = []
        for value in self._written:
            if value not in seen:
                node = self._program.nodes[value]
                num_bytes = counts.rows(node.space) * math.prod(node.shape) * width
                lifetimes.append(Lifetime(value, *self._lives[value], num_bytes))
        for field in self._fields:
            if field.kind == "parts":
                (value,) = field.key
                assert isinstance(value, int)
                node = self._program.nodes[value]
                num_bytes = len(arrays.tasks(node.map)) * math.prod(node.shape) * width
                kernel = self._lives[value][0]
                lifetimes.append(Lifetime(_name_of_parts(value), kernel, kernel, num_bytes))
        return pack(lifetimes)

    def _number(
        self,
        field: Field,
        arrays: GraphArrays,
        rows: Mapping[int, torch.Tensor],
        places: Mapping[int, int],
    ) -> int:
        kind, key = field.kind, field.key
        if kind == "threads":
            return torch.get_num_threads()
        if kind in ("value", "input"):
            return places[key[0]]  # pyright: ignore[reportArgumentType]
        if kind == "stride":
            tensor = rows[key[0]]  # pyright: ignore[reportArgumentType]
            return tensor.stride(0)
        if kind == "parts":
            return places[_name_of_parts(key[0])]  # pyright: ignore[reportArgumentType]
        return arrays.number(kind, key, self._dtype)


def _entered(graph: Graph, space: Space, argument: torch.Tensor) -> torch.Tensor:
    """An argument as rows, each of them contiguous."""
    rows = _interpreter.enter(graph, space, argument.detach())
    is_dense = all(
        length == 1 or stride == math.prod(rows.shape[axis + 2 :])
        for axis, (length, stride) in enumerate(
            zip(rows.shape[1:], rows.stride()[1:], strict=True)
        )
    )
    return rows if is_dense else rows.contiguous()


def _lifetimes(
    program: Program, kernels: Sequence[Sequence[int]]
) -> dict[int, tuple[int, int]]:
    """For each value, the kernel that computes it and the last that reads it."""
    lives: dict[int, tuple[int, int]] = {}

    def read(position: int, kernel: int) -> None:
        for operand in program.nodes[position].operands:
            value = source(program, operand)
            if value in lives:
                lives[value] = (lives[value][0], kernel)
            elif program.nodes[value].op == "outer":
                read(value, kernel)

    for kernel, values in enumerate(kernels):
        for value in values:
            lives[value] = (kernel, kernel)
            read(value, kernel)
    return lives


def _name_of_parts(value: int) -> int:
    return -1 - value


def _results(
    program: Program,
    graph: Graph,
    rows: Mapping[int, torch.Tensor],
    outputs: Sequence[int],
    keep: Collection[int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The outputs as the user has them, each with memory of its own."""

    def read(position: int) -> torch.Tensor:
        node = program.nodes[position]
        if node.op == "inverse_count":
            return _interpreter.inverse_count(graph, node.map, dtype)
        if node.op == "reshape":
            operand = read(node.operands[0])
            return operand.reshape(operand.shape[0], *node.shape)
        if node.op == "gather":
            return read(node.operands[0]).index_select(0, graph.index(node.map))
        return rows[position]

    taken = {rows[at].data_ptr() for at in keep}
    taken |= {t.data_ptr() for at, t in rows.items() if program.nodes[at].op in LEAVES}
    found = []
    for output in outputs:
        result = _interpreter.leave(graph, program.nodes[output].space, read(output))
        if result.data_ptr() in taken:
            result = result.clone()
        taken.add(result.data_ptr())
        found.append(result)
    return tuple(found)
