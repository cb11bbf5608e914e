"""Candidates of the genetic search, evaluated in C++: from genes to the time of a step.

The search asks for this thousands of times, and Python would take a second each. What a plan is
made from is derived once, by the same steps in Python (`_genetic.derive`); both give the same time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock.codegen import load_library
from penstock.graph import StepGraph
from penstock.planner.genetic._genes import Allocation
from penstock.planner.paging._accesses import OrderedStep, ordered_step
from penstock.planner.paging._timing import Speeds

_SOURCES = [
    Path(__file__).with_name(name)
    for name in ("evaluate_step.cpp", "evaluate_walk.cpp", "evaluate_timing.cpp")
]
# Without fused multiplications results are Python's to the last bit.
_FLAGS = ("-O3", "-ffp-contract=off")
_PASSES = 2  # of choosing ends of writes; the plan in the end takes more


class Evaluator:
    """A step graph with a memory and links, for candidates of any order and allocation.

    Args:
        graph: The graph.
        capacity: Bytes for objects.
        speeds: What takes how long.

    Attributes:
        sizes: Distinct sizes of values, in rising order.
    """

    def __init__(self, graph: StepGraph, capacity: int, speeds: Speeds) -> None:
        self.capacity, self.speeds = capacity, speeds
        step = ordered_step(graph)
        self.sizes = tuple(sorted({num_bytes for num_bytes in step.num_bytes if num_bytes}))
        library = _library()
        arrays = _Arrays.of(step, self.sizes, speeds)
        self._graph = ctypes.c_void_p(library.penstock_genetic_graph(ctypes.byref(arrays)))
        weakref.finalize(self, library.penstock_genetic_free, self._graph)

    def demand(self, order: Sequence[int]) -> list[int]:
        """How many values of each size live at once in an order, at most."""
        most = np.zeros(len(self.sizes), np.int64)
        operators = np.array(order, np.int32)
        _library().penstock_genetic_demand(self._graph, _pointer(operators), _pointer(most))
        return most.tolist()

    def evaluate(
        self, order: Sequence[int], classes: Sequence[int], wanted: dict[int, int]
    ) -> tuple[Allocation, float] | None:
        """Repair an allocation and simulate.

        Args:
            order: Operators by position, each once.
            classes: For each distinct size the class that it is in, named by its largest size.
            wanted: Objects by class; they are made to hold every operator and to fit the capacity.

        Returns:
            The repaired allocation and the time of a step; None where an operator does not fit.
        """
        operators = np.array(order, np.int32)
        class_of_size = np.array(classes, np.int32)
        counts = np.array([wanted.get(name, 0) for name in range(len(self.sizes))], np.int64)
        objects = np.zeros(len(self.sizes), np.int64)
        seconds = _library().penstock_genetic_evaluate(
            self._graph,
            _pointer(operators),
            _pointer(class_of_size),
            _pointer(counts),
            self.capacity,
            self.speeds.out_bytes_per_second,
            self.speeds.in_bytes_per_second,
            _PASSES,
            _pointer(objects),
        )
        if math.isinf(seconds):
            return None
        num_objects = {name: int(objects[name]) for name in sorted(set(classes))}
        return Allocation(tuple(classes), num_objects), seconds


class _Arrays(ctypes.Structure):
    """`struct GraphArrays` of evaluate_timing.cpp, field by field."""

    _counts: ClassVar = ("num_operators", "num_values", "num_storages", "num_sizes", "num_inputs")
    _pointers: ClassVar = (
        "seconds",
        "storage_of_value",
        "size_of_value",
        "sizes",
        "initial",
        "final",
        "persistent",
        "first_need",
        "needs",
        "first_create",
        "creates",
        "first_mutate",
        "mutates",
        "first_overwrite",
        "overwrites",
        "initial_of_final",
        "pinned",
        "inputs",
    )
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in _counts),
        *((name, ctypes.c_void_p) for name in _pointers),
    ]
    kept: tuple[np.ndarray, ...]  # what the pointers point at

    @classmethod
    def of(cls, step: OrderedStep, sizes: Sequence[int], speeds: Speeds) -> _Arrays:
        """The arrays of a graph; C++ copies them."""
        graph, num_bytes = step.graph, step.num_bytes
        index_of = {size: index for index, size in enumerate(sizes)}
        operators, storages = graph.operators, graph.storages
        renamed = np.full(len(num_bytes), -1, np.int32)
        pinned = np.zeros(len(num_bytes), np.uint8)
        for final, initial in step.renamed.items():
            renamed[final] = initial
        pinned[list(step.pinned)] = 1
        lists = (
            _lists([v for v in dict.fromkeys(o.needs) if num_bytes[v]] for o in operators),
            _lists([v for v in o.creates if num_bytes[v]] for o in operators),
            _lists(
                [v for pair in o.mutates if num_bytes[pair[0]] for v in pair] for o in operators
            ),
            _lists([v for pair in o.may_overwrite for v in pair] for o in operators),
        )
        arrays = (
            np.array(speeds.operator_seconds, np.float64),
            _int32(graph.storage_of_value),
            _int32(index_of.get(size, -1) for size in num_bytes),
            np.array(sizes, np.int64),
            _int32(-1 if s.initial is None else s.initial for s in storages),
            _int32(-1 if s.final is None else s.final for s in storages),
            np.array([s.persistent for s in storages], np.uint8),
            *(array for pair in lists for array in pair),
            renamed,
            pinned,
            _int32(step.inputs),
        )
        counts = len(operators), len(num_bytes), len(storages), len(sizes), len(step.inputs)
        made = cls(*counts, *(array.ctypes.data for array in arrays))
        made.kept = arrays
        return made


def _lists(parts: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of lists: where each one begins, and all items."""
    parts = list(parts)
    return _int32(np.cumsum([0, *map(len, parts)])), _int32(v for part in parts for v in part)


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL:
    pointer, double = ctypes.c_void_p, ctypes.c_double
    evaluate = [*[pointer] * 4, ctypes.c_int64, double, double, ctypes.c_int32, pointer]
    return load_library(
        "planner_genetic",
        _SOURCES,
        flags=_FLAGS,
        functions={
            "penstock_genetic_graph": (pointer, [pointer]),
            "penstock_genetic_free": (None, [pointer]),
            "penstock_genetic_demand": (None, [pointer] * 3),
            "penstock_genetic_evaluate": (double, evaluate),
        },
    )
