"""The C++ back end: one library for each program, one call for each of its directions.

The kernels of the schedule become functions of a shared library, built once and kept in the user's
cache. What a call needs of a graph is computed once for the graph; what is left for a call is to
fill a struct with pointers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from penstock.codegen import load_library
from penstock.rgnn.backends._invocation import (
    Backend,
    Invocation,
    Results,
    enter_arguments,
    leave_results,
)
from penstock.rgnn.backends.cpp._graph_arrays import GraphArrays, find_arrays
from penstock.rgnn.backends.cpp._kernel import FIELDS_OF_CALL, Field
from penstock.rgnn.backends.cpp._memory import ArenaValue, assign_offsets
from penstock.rgnn.backends.cpp._source import count_packed_elements, write_source
from penstock.rgnn.ir import TYPES, find_source
from penstock.rgnn.lowering import (
    Direction,
    KernelKind,
    LoweredProgram,
    find_live_ranges,
    find_overwritten,
    lower_for_arena,
)

DTYPES = {torch.float32: "float", torch.float64: "double"}
"""The dtypes that are computed in C++, by their names there; narrower ones are widened before."""

FLAGS = ("-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
_WORKSPACES = frozenset({"parts", "packed"})
"""Kinds of fields that are memory of one kernel's own."""
_INDEX_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t"}


class CppBackend(Backend):
    """Programs in generated C++, on the CPU."""

    lower = staticmethod(lower_for_arena)

    def __init__(self, lowered: LoweredProgram) -> None:
        super().__init__(lowered)
        traversals = (k for k in lowered.schedule.kernels if k.kind is KernelKind.TRAVERSAL)
        maps = dict.fromkeys(kernel.grouped_by for kernel in traversals)
        self._groupings = tuple(m for m in maps if m is not None and m.into not in TYPES)
        """The maps to groups of rows that one thread sums."""
        self._functions: dict[tuple[Any, ...], dict[Direction, _DirectionFunction]] = {}

    def __call__(self, invocation: Invocation) -> Results:
        """Compute the values of a direction.

        Raises:
            BuildError: There is no compiler, or it fails; the message says what to do.
            ValueError: The graph is not on the CPU.
        """
        graph = invocation.graph
        if graph.device.type != "cpu":
            raise ValueError(
                f'backend is "cpp", which computes on the CPU, and the graph is on {graph.device}; '
                f'use backend="auto", or graph.to("cpu")'
            )
        arrays = find_arrays(graph)
        has_hubs = any(len(arrays.hubs(grouping)) for grouping in self._groupings)
        key = (invocation.dtype, arrays.index_dtype, has_hubs)
        if key not in self._functions:
            self._functions[key] = self._build(*key)
        return self._functions[key][invocation.direction](invocation, arrays)

    def _build(
        self, dtype: torch.dtype, index_dtype: torch.dtype, has_hubs: bool
    ) -> dict[Direction, _DirectionFunction]:
        """Load the forward and the backward, built where they are not in the cache."""
        types = {"scalar": DTYPES[dtype], "index": _INDEX_TYPES[index_dtype]}
        text, fields_of = write_source(self._lowered, **types, has_hubs=has_hubs)
        library = load_library("rgnn", text, flags=FLAGS)
        functions = {}
        for name, direction in self._lowered.directions().items():
            function = getattr(library, f"penstock_{name}")
            arguments = (self._lowered, direction, function, fields_of[name], dtype)
            functions[direction] = _DirectionFunction(*arguments)
        return functions


@dataclasses.dataclass(frozen=True)
class _Binding:
    """Fields and addresses of a direction on one graph, the same in every call."""

    numbers: tuple[int, ...]
    """The fields; those of a call are 0."""
    shapes: dict[int, tuple[int, ...]]
    """Shapes of the values that the call returns."""
    addresses: tuple[tuple[int, int | None, int], ...]
    """Fields that are addresses of the call: the field, the rows or None for the arena, and the
    offset there in bytes."""
    arena_bytes: int


class _DirectionFunction:
    """A direction as a function of the library, and its bindings to graphs."""

    def __init__(
        self,
        lowered: LoweredProgram,
        direction: Direction,
        function: Any,
        fields: tuple[Field, ...],
        dtype: torch.dtype,
    ) -> None:
        self._function, self._direction = function, direction
        self._function.argtypes, self._function.restype = [ctypes.c_void_p], None
        self._program, self._dtype, self._fields = lowered.optimized.program, dtype, fields
        self._of_call = [
            (place, field.kind, value)
            for place, field in enumerate(fields)
            for value in field.subjects
            if field.kind in FIELDS_OF_CALL and isinstance(value, int)
        ]
        self._frame = ctypes.c_int64 * len(fields)
        kernels = direction.kernels
        values = [value for kernel in kernels for value in kernel.values]
        self._written = [value for value in values if value in lowered.schedule.materialised]
        self._live_ranges = find_live_ranges(self._program, kernels)
        self._in_place = find_overwritten(self._program, kernels, self._live_ranges)
        self._bindings: weakref.WeakKeyDictionary[GraphArrays, _Binding] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, invocation: Invocation, arrays: GraphArrays) -> Results:
        """Compute all values; return the outputs as the user has them, and what is kept."""
        program, keep = self._program, self._direction.keep
        binding = self._bindings.get(arrays)
        if binding is None:
            binding = self._bindings[arrays] = self._bind(arrays)
        rows = {at: tensor.contiguous() for at, tensor in invocation.given.items()}
        for position, entered in enter_arguments(program, invocation).items():
            rows[position] = entered if _has_dense_rows(entered) else entered.contiguous()
        for value, shape in binding.shapes.items():
            if value in keep:
                rows[value] = arrays.buffers.empty(shape, dtype=self._dtype)
            else:  # what the user sees has memory of its own
                rows[value] = torch.empty(shape, dtype=self._dtype, device="cpu")
        arena = arrays.buffers.scratch(binding.arena_bytes)
        numbers = list(binding.numbers)
        numbers[0] = torch.get_num_threads()
        for place, kind, value in self._of_call:
            if kind == "stride":
                numbers[place] = rows[value].stride(0)
        for place, base, offset in binding.addresses:
            memory = arena if base is None else rows[base]
            numbers[place] = memory.data_ptr() + offset
        self._function(self._frame(*numbers))
        return leave_results(program, invocation, rows)

    def _bind(self, arrays: GraphArrays) -> _Binding:
        """Assign offsets in the arena to values that do not leave; workspaces have names < 0."""
        counts, width = arrays.graph.counts, self._dtype.itemsize
        outputs = {find_source(self._program, output) for output in self._direction.outputs}
        owned = outputs.union(self._direction.keep)
        shapes, placed, same_place = {}, {}, {}
        for value in self._written:
            node = self._program.nodes[value]
            shapes[value] = (counts.rows(node.space), *node.shape)
            num_bytes = math.prod(shapes[value]) * width
            first, last = self._live_ranges[value]
            operand = self._in_place.get(value)
            if operand is None or operand in owned:
                placed[value] = ArenaValue(value, first, last, num_bytes)
                continue
            place = same_place.get(operand, operand)
            if value in owned:  # the result's memory is the operand's from the start
                same_place |= {at: value for at, of in same_place.items() if of == place}
                same_place[place] = value
                placed[value] = dataclasses.replace(placed.pop(place), value=value)
            else:
                same_place[value] = place
                placed[place] = dataclasses.replace(placed[place], last=last)
        numbers = tuple(
            0 if field.kind in FIELDS_OF_CALL else arrays.number(field, self._dtype)
            for field in self._fields
        )
        results = [each for value, each in placed.items() if value in owned]
        others = [each for value, each in placed.items() if value not in owned]
        places, arena_bytes = assign_offsets([*others, *self._find_workspaces(arrays)], results)
        addresses = []
        for place, kind, value in self._of_call:
            name = -1 - value if kind in _WORKSPACES else value
            name = same_place.get(name, name)
            if kind != "stride":
                addresses.append((place, *places.get(name, (name, 0))))
        shapes = {value: shape for value, shape in shapes.items() if value in owned}
        return _Binding(numbers, shapes, tuple(addresses), arena_bytes)

    def _find_workspaces(self, arrays: GraphArrays) -> Iterator[ArenaValue]:
        """Yield the memory of one kernel's own, by names < 0."""
        for _, kind, value in self._of_call:
            node = self._program.nodes[value]
            if kind == "parts":
                num_elements = len(arrays.tasks(node.map)) * math.prod(node.shape)
            elif kind == "packed":
                num_types = arrays.graph.counts.num_relations
                num_elements = num_types * count_packed_elements(self._program, value)
            else:
                continue
            kernel = self._live_ranges[value][0]
            num_bytes = num_elements * self._dtype.itemsize
            yield ArenaValue(-1 - value, kernel, kernel, num_bytes)


def _has_dense_rows(rows: torch.Tensor) -> bool:
    """Return whether each row is contiguous."""
    return all(
        length == 1 or stride == math.prod(rows.shape[axis + 2 :])
        for axis, (length, stride) in enumerate(zip(rows.shape[1:], rows.stride()[1:], strict=True))
    )
