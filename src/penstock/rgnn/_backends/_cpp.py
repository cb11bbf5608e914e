"""The backend of generated C++: one library for each plan, one call for each of its directions.

The kernels of the schedule become functions of a shared library, built once and kept in the user's
cache. What a call needs of a graph is built once for the graph; what is left for a call is to fill
a struct with pointers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from penstock.codegen import load_library
from penstock.rgnn import _interpreter
from penstock.rgnn._backends._cpp_graph import GraphArrays, arrays_of
from penstock.rgnn._backends._cpp_memory import Lifetime, lodge, pack
from penstock.rgnn._backends._cpp_source import Direction, write_source
from penstock.rgnn._backends._cpp_summed import packed_elements
from penstock.rgnn._graph import Graph
from penstock.rgnn._ir import LEAVES, Program
from penstock.rgnn._order import lifetimes, written_over
from penstock.rgnn._plan import Plan
from penstock.rgnn._rows import RowMap, Space
from penstock.rgnn._schedule import READS, TYPES, KernelKind, source

DTYPES = {torch.float32: "float", torch.float64: "double"}
"""The dtypes that are computed in C++, by their names there; narrower ones are widened before."""

FLAGS = ("-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
_KINDS_OF_CALL = frozenset({"threads", "value", "input", "stride", "parts", "packed"})
_ROOMS = frozenset({"parts", "packed"})
"""Kinds of fields that are memory of one kernel's own."""
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
    arrays = arrays_of(graph)
    has_hubs = any(len(arrays.hubs(grouping)) for grouping in _groupings(plan))
    key = ("cpp", dtype, arrays.index_dtype, has_hubs)
    compiled = plan.compiled.get(key)
    if compiled is None:
        compiled = plan.compiled[key] = _compiled(plan, dtype, arrays.index_dtype, has_hubs)
    assert isinstance(compiled, tuple)
    is_backward = values is not plan.forward and values == plan.backward
    runner: _Runner = compiled[is_backward]
    return runner(arrays, given, arguments, tuple(outputs), tuple(keep))


def _groupings(plan: Plan) -> tuple[RowMap, ...]:
    """The maps whose targets are groups of rows that one thread sums."""
    known = plan.compiled.get("cpp groupings")
    if not isinstance(known, tuple):
        of_kernels = (
            kernel.grouped_by
            for kernel in plan.summed_schedule.kernels
            if kernel.kind is KernelKind.TRAVERSAL
        )
        found = dict.fromkeys(m for m in of_kernels if m is not None and m.into not in TYPES)
        known = plan.compiled["cpp groupings"] = tuple(found)
    return known


def _compiled(
    plan: Plan, dtype: torch.dtype, index_dtype: torch.dtype, has_hubs: bool
) -> tuple[_Runner, ...]:
    """The forward and the backward of a plan, loaded."""
    index = _INDEX_TYPES[index_dtype]
    written = write_source(plan, scalar=DTYPES[dtype], index=index, has_hubs=has_hubs)
    library = load_library("rgnn", written.text, flags=FLAGS)
    return tuple(_Runner(plan, library, direction, dtype) for direction in written.directions)


@dataclasses.dataclass(frozen=True)
class _Binding:
    """What a direction needs of a graph, the same in every call."""

    numbers: tuple[int, ...]
    """The fields; those of a call are 0."""
    shapes: dict[int, tuple[int, ...]]
    """Of the values that the call returns."""
    same_place: dict[int, int]
    """Values that lie where another one does: which."""
    lodged: dict[int, tuple[int, int]]
    """Of the other values, those that lie in the memory of one of these: of which, and where."""
    offsets: dict[int, int]
    """Of the rest, in the arena."""
    arena_bytes: int


class _Runner:
    """One direction of a plan."""

    def __init__(
        self, plan: Plan, library: ctypes.CDLL, direction: Direction, dtype: torch.dtype
    ) -> None:
        self._entry = getattr(library, direction.entry)
        self._entry.argtypes, self._entry.restype = [ctypes.c_void_p], None
        self._program, self._dtype = plan.program, dtype
        self._fields = direction.fields
        self._of_call = [
            (place, field.kind, field.position)
            for place, field in enumerate(direction.fields)
            if field.kind in _KINDS_OF_CALL
        ]
        self._frame = ctypes.c_int64 * len(direction.fields)
        materialised = plan.summed_schedule.materialised
        values = [value for kernel in direction.kernels for value in kernel.values]
        self._written = [value for value in values if value in materialised]
        self._lives = lifetimes(plan.program, direction.kernels)
        self._in_place = written_over(plan.program, direction.kernels, self._lives)
        self._bindings: weakref.WeakKeyDictionary[GraphArrays, _Binding] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(
        self,
        arrays: GraphArrays,
        given: Mapping[int, torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        outputs: tuple[int, ...],
        keep: tuple[int, ...],
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Compute everything; see `_run.Execute`."""
        program = self._program
        binding = self._bindings.get(arrays)
        if binding is None:
            binding = self._bindings[arrays] = self._bind(arrays, outputs, keep)
        rows = {at: tensor.contiguous() for at, tensor in given.items()}
        for name, position in program.inputs().items():
            if name in arguments:
                space = program.nodes[position].space
                rows[position] = _entered(arrays.graph, space, arguments[name])
        for value, shape in binding.shapes.items():
            is_kept = value in keep  # what the user sees has memory of its own
            empty = arrays.blocks.empty if is_kept else torch.empty
            rows[value] = empty(shape, dtype=self._dtype)
        arena = arrays.blocks.scratch(binding.arena_bytes)
        numbers = list(binding.numbers)
        for place, kind, value in self._of_call:
            if kind == "threads":
                numbers[place] = torch.get_num_threads()
            elif kind == "stride":
                numbers[place] = rows[value].stride(0)
            elif value in rows and kind not in _ROOMS:
                numbers[place] = rows[value].data_ptr()
            else:
                name = _name_of_room(value) if kind in _ROOMS else value
                name = binding.same_place.get(name, name)
                if name in rows:
                    numbers[place] = rows[name].data_ptr()
                elif name in binding.lodged:
                    host, begin = binding.lodged[name]
                    numbers[place] = rows[host].data_ptr() + begin
                else:
                    numbers[place] = arena.data_ptr() + binding.offsets[name]
        self._entry(self._frame(*numbers))
        results = _results(program, arrays.graph, rows, outputs, keep, self._dtype)
        return results, {at: rows[at] for at in keep}

    def _bind(self, arrays: GraphArrays, outputs: Sequence[int], keep: Collection[int]) -> _Binding:
        """Offsets in the arena of what only this program sees; rooms have negative names."""
        counts, width = arrays.graph.counts, self._dtype.itemsize
        seen = {*keep, *(source(self._program, output) for output in outputs)}
        shapes, lives, same_place = {}, {}, {}
        for value in self._written:
            node = self._program.nodes[value]
            shapes[value] = (counts.rows(node.space), *node.shape)
            num_bytes = math.prod(shapes[value]) * width
            first, last = self._lives[value]
            operand = self._in_place.get(value)
            if operand is None or operand in seen:
                lives[value] = Lifetime(value, first, last, num_bytes)
                continue
            place = same_place.get(operand, operand)
            if value in seen:  # whose memory is taken from the start
                same_place |= {at: value for at, of in same_place.items() if of == place}
                same_place[place] = value
                lives[value] = dataclasses.replace(lives.pop(place), value=value)
            else:
                same_place[value] = place
                lives[place] = dataclasses.replace(lives[place], last=last)
        numbers = tuple(
            0 if field.kind in _KINDS_OF_CALL else arrays.number(field, self._dtype)
            for field in self._fields
        )
        hosts = [life for value, life in lives.items() if value in seen]
        others = [life for value, life in lives.items() if value not in seen]
        lodged, rest = lodge([*others, *self._rooms(arrays)], hosts)
        results = {value: shape for value, shape in shapes.items() if value in seen}
        return _Binding(numbers, results, same_place, lodged, *pack(rest))

    def _rooms(self, arrays: GraphArrays) -> Iterator[Lifetime]:
        """The memory of one kernel's own."""
        for _, kind, value in self._of_call:
            node = self._program.nodes[value]
            if kind == "parts":
                num_elements = len(arrays.tasks(node.map)) * math.prod(node.shape)
            elif kind == "packed":
                num_types = arrays.graph.counts.num_relations
                num_elements = num_types * packed_elements(self._program, value)
            else:
                continue
            kernel = self._lives[value][0]
            num_bytes = num_elements * self._dtype.itemsize
            yield Lifetime(_name_of_room(value), kernel, kernel, num_bytes)


def _entered(graph: Graph, space: Space, argument: torch.Tensor) -> torch.Tensor:
    """An argument as rows, each of them contiguous."""
    rows = _interpreter.enter(graph, space, argument.detach())
    is_dense = all(
        length == 1 or stride == math.prod(rows.shape[axis + 2 :])
        for axis, (length, stride) in enumerate(zip(rows.shape[1:], rows.stride()[1:], strict=True))
    )
    return rows if is_dense else rows.contiguous()


def _name_of_room(value: int) -> int:
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
    taken = {rows[at].data_ptr() for at in keep}
    taken |= {t.data_ptr() for at, t in rows.items() if program.nodes[at].op in LEAVES}
    found = []
    for output in outputs:
        value = _read(program, graph, rows, output, dtype)
        result = _interpreter.leave(graph, program.nodes[output].space, value)
        if result.data_ptr() in taken:
            result = result.clone()
        taken.add(result.data_ptr())
        found.append(result)
    return tuple(found)


def _read(
    program: Program,
    graph: Graph,
    rows: Mapping[int, torch.Tensor],
    position: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The rows of a value; what is no more than a read is made here."""
    node = program.nodes[position]
    if node.op == "inverse_count":
        return _interpreter.inverse_count(graph, node.map, dtype)
    if node.op not in READS:
        return rows[position]
    operand = _read(program, graph, rows, node.operands[0], dtype)
    if node.op == "gather":
        return operand.index_select(0, graph.index(node.map))
    return operand.reshape(operand.shape[0], *node.shape)
