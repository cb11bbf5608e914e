"""Bytes that launches of the kernels ask of memory, as formulas of shapes, counts and tiles.

With R rows in T tiles or P pieces, H heads, and ceil(a / b) written a // b here, a launch asks for

    segment_gemm      H (R K W // w of x, T K W of the weights, R W of y), of K inner elements and
                      W columns in blocks of w; for each block the rows' indices, and 3 T numbers
    weight_gradient   H (R A B // b of x, R B A // a of g, P A B of the result), of A x B in blocks
                      of a x b; for each block the rows' indices, and 2 P numbers
    add_pieces        P L elements and the L of each target, and 2 or 3 numbers for each block
    merge_softmax     2 P L elements, once more the first L of each group, and 2 L stored

and a traversal, whose source is generated, for the lanes of each of its accesses: as many features
as its mask lets through, for each row, group or program. They are requests, before any cache.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock.codegen import ByteCount, ceil_div
from penstock.rgnn.backends.triton._launch import KernelLaunch


def launched_bytes(launch: KernelLaunch) -> ByteCount:
    """Return the bytes of a launch, from its tables of rows, which are read.

    Args:
        launch: Of a kernel of `_kernels.py`, or of a generated traversal.
    """
    if 0 in launch.grid:
        return ByteCount(loaded_bytes=0, stored_bytes=0, num_launches=0)
    formula = _FORMULAS.get(launch.kernel.fn.__name__, _traversal_bytes)
    return formula(launch)


class _Arguments(dict[str, Any]):
    """Arguments of a launch by name."""

    @classmethod
    def of(cls, launch: KernelLaunch) -> _Arguments:
        names = inspect.signature(launch.kernel.fn).parameters
        return cls(zip(names, launch.arguments, strict=False)) | dict(launch.constants)

    def __or__(self, other: Any) -> _Arguments:
        return _Arguments({**self, **other})

    def item_bytes(self, name: str) -> int:
        return self[name].element_size()

    def index_bytes(self, *names: str) -> int:
        """Return the bytes of one number of each index that is there."""
        there = (name for name in names if self[f"HAS_{name.upper()}"])
        return sum(self.item_bytes(name) for name in there)

    def count_rows(self, begins: str, ends: str) -> int:
        return int((self[ends].long() - self[begins].long()).sum())


def _segment_gemm_bytes(launch: KernelLaunch) -> ByteCount:
    of = _Arguments.of(launch)
    heads, inner, width = of["HEADS"], of["INNER"], of["WIDTH"]
    tiles, rows = len(of["tile_begins"]), of.count_rows("tile_begins", "tile_ends")
    blocks = ceil_div(width, of["BLOCK_WIDTH"])
    numbers = tiles * sum(map(of.item_bytes, ("tile_begins", "tile_ends", "tile_types")))
    numbers += rows * of.index_bytes("operand_index", "out_index")
    loaded = rows * inner * blocks * of.item_bytes("operand")
    loaded += tiles * inner * width * of.item_bytes("weight")
    return _requests(
        heads * loaded, heads * rows * width * of.item_bytes("out"), heads * blocks * numbers
    )


def _weight_gradient_bytes(launch: KernelLaunch) -> ByteCount:
    of = _Arguments.of(launch)
    heads, height, width = of["HEADS"], of["HEIGHT"], of["WIDTH"]
    pieces, rows = len(of["piece_begins"]), of.count_rows("piece_begins", "piece_ends")
    down, across = ceil_div(height, of["BLOCK_HEIGHT"]), ceil_div(width, of["BLOCK_WIDTH"])
    numbers = pieces * sum(map(of.item_bytes, ("piece_begins", "piece_ends")))
    numbers += rows * of.index_bytes("left_index", "right_index")
    loaded = rows * height * across * of.item_bytes("left")
    loaded += rows * width * down * of.item_bytes("right")
    stored = pieces * height * width * of.item_bytes("partial")
    return _requests(heads * loaded, heads * stored, heads * down * across * numbers)


def _add_pieces_bytes(launch: KernelLaunch) -> ByteCount:
    of = _Arguments.of(launch)
    groups, length = launch.grid[0], of["LENGTH"]
    numbers = 2 * of.item_bytes("first_pieces") + of.index_bytes("targets")
    loaded = int(of["first_pieces"][-1] - of["first_pieces"][0]) * length
    return _requests(
        loaded * of.item_bytes("partial"),
        groups * length * of.item_bytes("out"),
        groups * launch.grid[1] * numbers,
    )


def _merge_softmax_bytes(launch: KernelLaunch) -> ByteCount:
    of = _Arguments.of(launch)
    groups, length = launch.grid[0], of["LENGTH"]
    pieces = int(of["first_pieces"][-1] - of["first_pieces"][0])
    element = of.item_bytes("partial_max")
    numbers = 2 * of.item_bytes("first_pieces") * groups * launch.grid[1]
    return _requests(
        (2 * pieces + groups) * length * element, 2 * groups * length * element, numbers
    )


def _traversal_bytes(launch: KernelLaunch) -> ByteCount:
    of = _Arguments.of(launch)
    counts = {"": launch.grid[0], "is_group": of.get("num_items", 0)}
    counts["is_row"] = of.get("num_rows", 0)
    if "begins" in of:
        counts["is_row"] = of.count_rows("begins", "ends")
    sums = {"load": 0, "store": 0}
    tiles = launch.grid[1] if len(launch.grid) > 1 else 1
    for access in _find_accesses(launch.kernel.fn, of.get("FEATURES", 0) * tiles):
        lanes = counts[access.leading] * access.num_features
        lanes *= 1 if access.is_tiled else tiles
        sums[access.kind] += lanes * of.item_bytes(access.pointer)
    return ByteCount(loaded_bytes=sums["load"], stored_bytes=sums["store"])


def _requests(loaded_bytes: int, stored_bytes: int, table_bytes: int) -> ByteCount:
    return ByteCount(
        loaded_bytes=loaded_bytes + table_bytes, stored_bytes=stored_bytes, table_bytes=table_bytes
    )


_FORMULAS: Mapping[str, Callable[[KernelLaunch], ByteCount]] = {
    "segment_gemm": _segment_gemm_bytes,
    "weight_gradient": _weight_gradient_bytes,
    "add_pieces": _add_pieces_bytes,
    "merge_softmax_pieces": _merge_softmax_bytes,
}


_NO_MASK = ast.parse("True", mode="eval").body


class _TraversalAccess:
    """One load or store in the source of a traversal.

    Attributes:
        kind: `"load"` or `"store"`.
        pointer: Name of the parameter that is read or written.
        leading: `"is_row"` or `"is_group"`, of which each has the lanes once; `""` for a program.
        num_features: Lanes of each.
        is_tiled: Whether the programs of the second axis of the grid have features of it each.
    """

    def __init__(self, call: ast.Call, scope: Mapping[str, Any], parameters: set[str]) -> None:
        assert isinstance(call.func, ast.Attribute)
        self.kind = call.func.attr
        names = [each.id for each in ast.walk(call.args[0]) if isinstance(each, ast.Name)]
        (self.pointer,) = {name for name in names if name in parameters}
        masks = [each.value for each in call.keywords if each.arg == "mask"]
        mask = masks[0] if masks else _NO_MASK
        of_mask = {each.id for each in ast.walk(mask) if isinstance(each, ast.Name)}
        self.leading = next((each for each in ("is_row", "is_group") if each in of_mask), "")
        self.is_tiled = "feature" in names
        lanes = np.broadcast_to(_evaluate(mask, scope), np.shape(_evaluate(call.args[0], scope)))
        self.num_features = int(np.count_nonzero(lanes))


@functools.cache
def _find_accesses(function: Callable[..., Any], num_features: int) -> tuple[_TraversalAccess, ...]:
    """Return the accesses of a traversal; in their masks one row, or group, stands for all."""
    (definition,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef)
    parameters = {each.arg for each in definition.args.args}
    # Axes of groups and rows come first in each block; here they have one lane.
    num_leading = 2 if "groups" in parameters else 1
    scope = _LaneScope(num_leading, num_features, parameters)
    found: list[_TraversalAccess] = []
    for statement in _walk_statements(definition.body):
        found += [
            _TraversalAccess(each, scope, parameters)
            for each in ast.walk(statement)
            if isinstance(each, ast.Call) and _is_access(each.func)
        ]
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            scope.note_axis(statement, statement.value)
    return tuple(found)


def _is_access(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in ("load", "store"):
        return False
    return isinstance(function.value, ast.Name) and function.value.id == "tl"


def _walk_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.For):
            yield from _walk_statements(statement.body)
        else:
            yield statement


class _LaneScope(dict[str, Any]):
    """Names of a traversal: axes of features have their lanes, all else has one lane of zero."""

    def __init__(self, num_leading: int, num_features: int, parameters: set[str]) -> None:
        super().__init__(feature=np.arange(num_features))
        self._one_lane = np.zeros((1,) * num_leading, np.int64)
        self._parameters = parameters

    def note_axis(self, statement: ast.Assign, call: ast.Call) -> None:
        """Add an axis of features, as in `f1 = tl.arange(0, 16)`."""
        (target,) = statement.targets
        if isinstance(target, ast.Name) and "tl.arange(0, " in ast.unparse(call):
            length = call.args[1]
            if isinstance(length, ast.Constant) and isinstance(length.value, int):
                self[target.id] = np.arange(length.value)

    def __missing__(self, name: str) -> Any:
        if name in self._parameters:
            return 0
        return self._one_lane + 1 > 0 if name in ("is_row", "is_group") else self._one_lane


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Evaluate an address or a mask of generated source: names, numbers, arithmetic, new axes."""
    return eval(compile(ast.Expression(node), "<access>", "eval"), {"__builtins__": {}}, scope)
